//! Bodies of the `ncclParam` entries: Strata's own variables, and those of NCCL's that it reads.

use crate::config::{Config, VARIABLES};
use crate::error::{Error, Result};
use crate::interface::pointer::{Buffer, Ptr, Text};
use crate::interface::types::{null, ParamHandle};
use std::cell::RefCell;
use std::ffi::{c_int, CString};
use std::sync::LazyLock;

/// The variables of NCCL's that Strata reads, and what holds when they are not set.
const NCCL_VARIABLES: &[(&str, &str)] = &[
    ("NCCL_COMM_BLOCKING", "1"),
    ("NCCL_COMM_ID", ""),
    ("NCCL_DEBUG", ""),
    ("NCCL_DEBUG_FILE", ""),
    ("NCCL_HOSTID", ""),
    ("NCCL_SOCKET_FAMILY", ""),
    ("NCCL_SOCKET_IFNAME", ""),
];

/// All keys; a handle is the number of its key, from one.
static KEYS: LazyLock<Vec<CString>> = LazyLock::new(|| {
    let ours = VARIABLES.iter().map(|variable| variable.name);
    let theirs = NCCL_VARIABLES.iter().map(|(name, _)| *name);
    ours.chain(theirs).filter_map(|name| CString::new(name).ok()).collect()
});

thread_local! {
    static SHOWN: RefCell<CString> = RefCell::default();
    static SHOWN_BY_KEY: RefCell<CString> = RefCell::default();
    static SHOWN_KEYS: RefCell<Vec<Text>> = const { RefCell::new(Vec::new()) };
}

fn key(handle: ParamHandle) -> Result<&'static str> {
    let key = handle.0.checked_sub(1).and_then(|index| KEYS.get(index));
    key.and_then(|key| key.to_str().ok())
        .ok_or_else(|| Error::InvalidArgument(format!("{:#x} is not the handle of a parameter", handle.0)))
}

fn value(key: &str) -> Result<String> {
    if let Some((_, default)) = NCCL_VARIABLES.iter().find(|(name, _)| *name == key) {
        return Ok(std::env::var(key).unwrap_or_else(|_| default.to_string()));
    }
    Config::from_env().0.get(key).ok_or_else(|| Error::InvalidArgument(format!("there is no parameter {key}")))
}

fn c_string(text: String) -> Result<CString> {
    CString::new(text).map_err(|_| Error::InvalidArgument("the value contains a zero byte".to_string()))
}

/// `ncclParamBind`
pub fn bind(out: Ptr<ParamHandle>, name: Text) -> Result<()> {
    if out.is_null() {
        return Err(null("out"));
    }
    let name = name.get("key")?;
    let index = KEYS.iter().position(|key| key.to_str() == Ok(&name));
    let index = index.ok_or_else(|| Error::InvalidArgument(format!("there is no parameter {name}")))?;
    out.set("out", ParamHandle(index + 1))
}

/// `ncclParamGetI8` and its like
pub fn get_number<T: TryFrom<i128>>(handle: ParamHandle, out: Ptr<T>) -> Result<()> {
    let key = key(handle)?;
    if out.is_null() {
        return Err(null("out"));
    }
    let text = value(key)?;
    let number = match text.as_str() {
        "true" => Some(1),
        "false" => Some(0),
        digits => digits.parse::<i128>().ok(),
    };
    let number = number.ok_or_else(|| Error::InvalidArgument(format!("{key}={text} is not a number")))?;
    let fits = T::try_from(number);
    out.set("out", fits.map_err(|_| Error::InvalidArgument(format!("{key}={text} does not fit the type asked for")))?)
}

/// `ncclParamGetStr`
pub fn get_text(handle: ParamHandle, out: Ptr<Text>) -> Result<()> {
    let key = key(handle)?;
    let text = c_string(value(key)?)?;
    SHOWN.with_borrow_mut(|shown| {
        *shown = text;
        // SAFETY: the text must stay until the thread's next call; because only that changes it.
        out.set("out", unsafe { Text::lent(shown) })
    })
}

/// `ncclParamGet`: the value's text with its zero byte, as the value has no other form.
pub fn get_bytes(handle: ParamHandle, out: Buffer, most: c_int, length: Ptr<c_int>) -> Result<()> {
    let key = key(handle)?;
    let text = c_string(value(key)?)?;
    let bytes = text.as_bytes_with_nul();
    if length.is_null() {
        return Err(null("len"));
    }
    if usize::try_from(most).map_or(true, |most| most < bytes.len()) {
        return Err(Error::InvalidArgument(format!("{key} has {} bytes; there is room for {most}", bytes.len())));
    }
    out.as_const().in_process(bytes.len(), "out")?.write(bytes);
    length.set("len", bytes.len() as c_int)
}

/// `ncclParamGetParameter`
pub fn get_by_key(name: Text, out: Ptr<Text>, length: Ptr<c_int>) -> Result<()> {
    let name = name.get("key")?;
    if out.is_null() {
        return Err(null("value"));
    }
    if length.is_null() {
        return Err(null("valueLen"));
    }
    let text = c_string(value(&name)?)?;
    length.set("valueLen", text.as_bytes().len() as c_int)?;
    SHOWN_BY_KEY.with_borrow_mut(|shown| {
        *shown = text;
        // SAFETY: the text must stay until the thread's next call; because only that changes it.
        out.set("value", unsafe { Text::lent(shown) })
    })
}

/// `ncclParamGetAllParameterKeys`
pub fn all_keys(table: Ptr<Ptr<Text>>, length: Ptr<c_int>) -> Result<()> {
    if table.is_null() {
        return Err(null("table"));
    }
    length.set("tableLen", KEYS.len() as c_int)?;
    SHOWN_KEYS.with_borrow_mut(|keys| {
        *keys = KEYS.iter().map(|key| Text::to(key)).collect();
        // SAFETY: the keys must stay until the thread's next call; because only that changes them.
        table.set("table", unsafe { Ptr::to(keys.as_mut_ptr()) })
    })
}

/// `ncclParamDumpAll`
pub fn dump() {
    for key in KEYS.iter().filter_map(|key| key.to_str().ok()) {
        crate::info!("{key}={}", value(key).unwrap_or_default());
    }
}
