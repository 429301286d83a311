//! Pointers that C programs pass, and the only ways to read and write through them.
//!
//! A pointer can be null, and that is checked at each use. What is not null is what the C interface says it is, or the
//! program is wrong and was wrong with NVIDIA's library too: on this rest the few unsafe operations of this file.
//! C makes values of these types when it calls; who makes one in Rust makes the same promise, in an unsafe call.

use super::types::{null, CType, Status};
use crate::error::{Error, Result};
use crate::memory::{DeviceRegion, Region};
use std::ffi::{c_char, CStr};
use std::mem::MaybeUninit;

/// `T*`
#[repr(transparent)]
pub struct Ptr<T>(*mut T);

/// `const T*`
#[repr(transparent)]
pub struct ConstPtr<T>(*const T);

/// `const char*`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Text(*const c_char);

macro_rules! buffers {
    ($($(#[doc = $doc:literal])+ $name:ident = $c:literal;)*) => { $(
        $(#[doc = $doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(usize);

        impl $name {
            /// No memory.
            pub const NULL: $name = $name(0);

            /// Memory that begins at an address, or something else that the interface passes as such.
            ///
            /// # Safety
            /// What the interface says of the argument that this becomes: so much memory is there, for as long.
            pub const unsafe fn from_address(address: usize) -> $name {
                $name(address)
            }

            /// Where it begins.
            pub fn address(self) -> usize {
                self.0
            }

            /// Whether there is none.
            pub fn is_null(self) -> bool {
                self == Self::NULL
            }

            /// What begins so many bytes further in the same memory.
            pub fn at(self, bytes: usize) -> $name {
                $name(self.0.wrapping_add(bytes))
            }
        }

        impl CType for $name {
            fn c() -> String {
                $c.to_string()
            }

            fn required(&self, name: &str) -> Result<()> {
                match self.is_null() {
                    true => Err(null(name)),
                    false => Ok(()),
                }
            }
        }
    )* };
}

buffers! {
    /// Memory that is written.
    Buffer = "void*";
    /// Memory that is only read.
    ConstBuffer = "const void*";
}

impl Buffer {
    /// The same memory, only read.
    pub fn as_const(self) -> ConstBuffer {
        ConstBuffer(self.0)
    }
}

/// `void (*)(void*)`
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct Callback(Option<extern "C" fn(usize)>);

/// `void (*)(void*, ncclResult_t)`
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct StatusCallback(Option<extern "C" fn(usize, Status)>);

impl<T> Clone for Ptr<T> {
    fn clone(&self) -> Ptr<T> {
        *self
    }
}
impl<T> Copy for Ptr<T> {}
impl<T> Clone for ConstPtr<T> {
    fn clone(&self) -> ConstPtr<T> {
        *self
    }
}
impl<T> Copy for ConstPtr<T> {}

// SAFETY: the pointee may be written from another thread; because NCCL writes the handles of nonblocking communicators
// from one of its own threads too, and the interface tells programs so.
unsafe impl<T> Send for Ptr<T> {}

impl<T: CType> CType for Ptr<T> {
    fn c() -> String {
        format!("{}*", T::c())
    }

    fn required(&self, name: &str) -> Result<()> {
        if self.is_null() {
            return Err(null(name));
        }
        Ok(())
    }
}

impl<T: CType> CType for ConstPtr<T> {
    fn c() -> String {
        format!("const {}*", T::c())
    }

    fn required(&self, name: &str) -> Result<()> {
        if self.is_null() {
            return Err(null(name));
        }
        Ok(())
    }
}

impl CType for Text {
    fn c() -> String {
        "const char*".to_string()
    }
}

impl CType for Callback {
    fn c() -> String {
        "strataCallback_t".to_string()
    }
}

impl CType for StatusCallback {
    fn c() -> String {
        "strataStatusCallback_t".to_string()
    }
}

impl<T> Ptr<T> {
    /// A pointer for a C program, or a library.
    ///
    /// # Safety
    /// What the interface says of the argument that this becomes: the target is there, for as long.
    pub const unsafe fn to(target: *mut T) -> Ptr<T> {
        Ptr(target)
    }

    /// No pointer.
    pub fn null() -> Ptr<T> {
        Ptr(std::ptr::null_mut())
    }

    /// Whether it is null.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Where it points, for whoever reads what another thread writes there.
    pub fn address<U>(self) -> *const U {
        self.0.cast_const().cast()
    }

    /// A pointer to element `index`.
    pub fn at(self, index: usize) -> Ptr<T> {
        Ptr(self.0.wrapping_add(index))
    }

    /// Writes the value there.
    pub fn set(self, name: &str, value: T) -> Result<()> {
        if self.0.is_null() {
            return Err(null(name));
        }
        // SAFETY: the place must be valid for a write; because it is not null and the C program gives room for it.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes the first `bytes` bytes of a structure.
    pub fn set_prefix(self, bytes: usize, value: &T) -> Result<()>
    where
        T: PlainData,
    {
        if self.0.is_null() {
            return Err(null("output"));
        }
        let bytes = bytes.min(size_of::<T>());
        let source = std::ptr::from_ref(value).cast::<MaybeUninit<u8>>();
        // SAFETY: both must be valid for so many bytes; because the program's structure says that it is as long and
        // ours is no shorter.
        unsafe { std::ptr::copy_nonoverlapping(source, self.0.cast(), bytes) };
        Ok(())
    }

    /// The same, only read.
    pub fn as_const(self) -> ConstPtr<T> {
        ConstPtr(self.0)
    }
}

impl<T: Copy> ConstPtr<T> {
    /// Reads the value there.
    pub fn get(self, name: &str) -> Result<T> {
        self.get_at(0, name)
    }

    /// Reads element `index`.
    pub fn get_at(self, index: usize, name: &str) -> Result<T> {
        if self.0.is_null() {
            return Err(null(name));
        }
        // SAFETY: the element must be initialised; because it is not null and the C program says that it is there.
        Ok(unsafe { self.0.wrapping_add(index).read_unaligned() })
    }

    /// Reads `count` elements.
    pub fn get_all(self, count: usize, name: &str) -> Result<Vec<T>> {
        (0..count).map(|index| self.get_at(index, name)).collect()
    }
}

impl<T> ConstPtr<T> {
    /// Whether it is null.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// No pointer.
    pub fn null() -> ConstPtr<T> {
        ConstPtr(std::ptr::null())
    }

    /// The same address, for another type.
    pub fn cast<U>(self) -> ConstPtr<U> {
        ConstPtr(self.0.cast())
    }

    /// Reads the first `bytes` bytes of a structure that may be shorter or longer than ours; the rest comes from
    /// `defaults`.
    ///
    /// `T` must be plain data for which any bytes are a value.
    pub fn get_prefix(self, bytes: usize, mut defaults: T) -> T
    where
        T: PlainData,
    {
        let bytes = bytes.min(size_of::<T>());
        let target = std::ptr::from_mut(&mut defaults).cast::<MaybeUninit<u8>>();
        // SAFETY: both are valid for so many bytes and any bytes are a `T`; because the structure says that it is as
        // long, `T` is no shorter, and the trait says so.
        unsafe { std::ptr::copy_nonoverlapping(self.0.cast(), target, bytes) };
        defaults
    }
}

/// Structures for which any bytes are a value.
///
/// # Safety
/// All fields are integers, floats, or types of this file.
pub unsafe trait PlainData: Copy {}

impl Text {
    /// No text.
    pub const NULL: Text = Text(std::ptr::null());

    /// A text that stays.
    pub const fn to(text: &'static CStr) -> Text {
        Text(text.as_ptr())
    }

    /// A text that goes some time.
    ///
    /// # Safety
    /// It stays as long as the interface says of the argument or result that this becomes.
    pub const unsafe fn lent(text: &CStr) -> Text {
        Text(text.as_ptr())
    }

    /// Whether it is null.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// A copy of the text.
    pub fn get(self, name: &str) -> Result<String> {
        if self.0.is_null() {
            return Err(null(name));
        }
        // SAFETY: the text must end with a zero byte; because it is not null and C strings do.
        let text = unsafe { CStr::from_ptr(self.0) };
        let text = text.to_str().map_err(|_| Error::InvalidArgument(format!("{name} argument is not UTF-8")))?;
        Ok(text.to_string())
    }
}

impl Callback {
    /// A function for a library to call.
    pub fn to(function: extern "C" fn(usize)) -> Callback {
        Callback(Some(function))
    }

    /// The function, in a form that can be called.
    pub fn get(self, name: &str) -> Result<impl Fn(usize) + Send> {
        let function = self.0.ok_or_else(|| null(name))?;
        Ok(move |argument| function(argument))
    }
}

impl StatusCallback {
    /// A function for a library to call.
    pub fn to(function: extern "C" fn(usize, Status)) -> StatusCallback {
        StatusCallback(Some(function))
    }

    /// The function, in a form that can be called.
    pub fn get(self, name: &str) -> Result<impl Fn(usize, Status) + Send> {
        let function = self.0.ok_or_else(|| null(name))?;
        Ok(move |argument, status| function(argument, status))
    }
}

impl ConstBuffer {
    /// The buffer as `len` bytes on a communicator's device; a null buffer has none.
    pub fn on_device(self, len: usize, name: &str) -> Result<DeviceRegion> {
        match (len, self.is_null()) {
            (0, _) => Ok(DeviceRegion::EMPTY),
            (_, true) => Err(null(name)),
            // SAFETY: the bytes must be usable until the operation has ended; because the C program promises that of
            // the buffers of an operation.
            (_, false) => Ok(unsafe { DeviceRegion::new(self.0 as *mut u8, len) }),
        }
    }

    /// The buffer as `len` bytes of this process; a null buffer has none.
    pub fn in_process(self, len: usize, name: &str) -> Result<Region> {
        // SAFETY: the bytes must be this process's; because those of arguments that are no buffers of operations are.
        Ok(unsafe { self.on_device(len, name)?.in_process() })
    }
}
