//! What every entry of the C interface does around its body: the panic boundary, the result code, the log line.
//!
//! The table ([`super::table`]) makes each entry with the [`api`](crate::api) macro, so that none can forget it.

use super::handles;
use super::pointer::Text;
use super::types::{CType, CommHandle, Status};
use crate::error::{Error, Result};
use std::any::Any;
use std::ffi::c_int;
use std::panic::{catch_unwind, AssertUnwindSafe};

/// An argument's name, and how its type is written in C.
pub type Argument = (&'static str, fn() -> String);

/// One function of the interface, as data.
pub struct Function {
    /// Its name.
    pub name: &'static str,
    /// The first release of NCCL that has it (`strata` for our own).
    pub since: &'static str,
    /// `native`, or `unsupported` on the host device.
    pub kind: &'static str,
    /// Whether it has a twin whose name starts with `p`.
    pub twin: bool,
    /// The part of the interface it belongs to.
    pub section: &'static str,
    /// What it does, in lines.
    pub doc: &'static [&'static str],
    /// How its result is written in C.
    pub result: fn() -> String,
    /// Its arguments.
    pub arguments: &'static [Argument],
}

impl Function {
    /// Its prototype in C, under this name.
    pub fn prototype(&self, name: &str) -> String {
        let arguments: Vec<String> = self.arguments.iter().map(|(name, c)| format!("{} {name}", c())).collect();
        let arguments = if arguments.is_empty() { "void".to_string() } else { arguments.join(", ") };
        format!("{} {name}({arguments});", (self.result)())
    }

    /// The names it is exported under.
    pub fn names(&self) -> Vec<String> {
        let twin = self.twin.then(|| format!("p{}", self.name));
        std::iter::once(self.name.to_string()).chain(twin).collect()
    }
}

/// What an entry returns to C, and what its body returns to the boundary.
pub trait Returned: CType {
    /// What the body returns.
    type Body;
    /// The C value for it.
    fn deliver(call: &'static str, comm: CommHandle, body: Self::Body) -> Self;
    /// The C value after a bug.
    fn broken() -> Self;
}

impl Returned for Status {
    type Body = Result<()>;

    fn deliver(call: &'static str, comm: CommHandle, body: Result<()>) -> Status {
        match body {
            Ok(()) => Status::SUCCESS,
            Err(error) => report(call, comm, &error),
        }
    }

    fn broken() -> Status {
        Status(Error::Internal(String::new()).code())
    }
}

macro_rules! returned_as_is {
    ($($type:ty = $broken:expr),* $(,)?) => { $(
        impl Returned for $type {
            type Body = $type;

            fn deliver(_: &'static str, _: CommHandle, body: $type) -> $type {
                body
            }

            fn broken() -> $type {
                $broken
            }
        }
    )* };
}

returned_as_is! { () = (), c_int = -1, Text = Text::NULL, super::layouts::Team = super::layouts::Team::NONE }

/// The only place where an error becomes a result code. It is logged here, once, with the call it came from.
fn report(call: &'static str, comm: CommHandle, error: &Error) -> Status {
    if *error != Error::InProgress {
        crate::log::warn(&line(call, comm, error));
    }
    Status(error.code())
}

fn line(call: &str, comm: CommHandle, error: &Error) -> String {
    let text = error.text();
    // Some texts are NCCL's own and name the call already.
    let text = text.strip_prefix(call).map_or(text, |rest| rest.trim_start_matches([':', ' ']));
    format!("{call}: {text} (result {}{})", error.code(), handles::describe(comm))
}

/// Runs the body of an entry. A panic is a bug of ours: it ends here and leaves the communicator unusable.
pub fn enter<R: Returned>(call: &'static str, comm: CommHandle, body: impl FnOnce() -> R::Body) -> R {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(body) => R::deliver(call, comm, body),
        Err(panic) => {
            let error = Error::Internal(format!("a bug in Strata: {}", panic_text(panic.as_ref())));
            handles::poison(comm, &error);
            report(call, comm, &error);
            R::broken()
        }
    }
}

/// What a panic said.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (_, Some(text)) => text,
        _ => "a panic without a text",
    }
}

/// Declares functions of the C interface: the exported entries, their twins, and the list of them as data.
#[macro_export]
#[doc(hidden)]
macro_rules! api {
    (@twin yes) => { true };
    (@twin no) => { false };
    (@run native, $target:expr, $($argument:ident)*) => { $target($($argument),*) };
    (@run unsupported, $why:expr, $($argument:ident)*) => {{
        let refuse = || -> $crate::error::Result<()> {
            $($crate::abi::types::CType::required(&$argument, stringify!($argument))?;)*
            Err($crate::error::Error::InvalidUsage($why.to_string()))
        };
        refuse()
    }};
    (@twins yes $(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        mod twins {
            use super::*;
            $(
                #[export_name = concat!("p", stringify!($name))]
                extern "C" fn $name($($argument: $type),*) -> $result {
                    inner::$name($($argument),*)
                }
            )*
        }
    };
    (@twins no $($rest:tt)*) => {};
    ($twin:ident $($section:literal { $(
        $(#[doc = $doc:literal])+
        $since:literal fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty = $kind:ident($target:expr);
    )* })*) => {
        // Both names lead here, never to each other: a profiler that takes the place of one of them calls the other.
        mod inner {
            use super::*;
            $($(
                pub fn $name($($argument: $type),*) -> $result {
                    let comm = $crate::abi::types::CommHandle::NULL
                        $(.or($crate::abi::types::CType::communicator(&$argument)))*;
                    $crate::abi::entry::enter::<$result>(stringify!($name), comm, || {
                        $crate::api!(@run $kind, $target, $($argument)*)
                    })
                }
            )*)*
        }

        $($(
            #[no_mangle]
            extern "C" fn $name($($argument: $type),*) -> $result {
                inner::$name($($argument),*)
            }
        )*)*

        $crate::api!(@twins $twin $($(fn $name($($argument: $type),*) -> $result;)*)*);

        /// The functions declared here.
        pub const FUNCTIONS: &[$crate::abi::entry::Function] = &[$($($crate::abi::entry::Function {
            name: stringify!($name),
            since: $since,
            kind: stringify!($kind),
            twin: $crate::api!(@twin $twin),
            section: $section,
            doc: &[$($doc),+],
            result: <$result as $crate::abi::types::CType>::c,
            arguments: &[$((stringify!($argument), <$type as $crate::abi::types::CType>::c)),*],
        },)*)*];
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_ends_at_the_boundary_and_leaves_the_communicator_unusable() {
        let handle = handles::Handle::reserve(true);
        let status = enter::<Status>("ncclAllReduce", handle.name, || panic!("a test's panic"));
        assert_eq!(status, Status(3));
        assert_eq!(handle.outcome().err().unwrap().code(), 3);
        assert_eq!(enter::<c_int>("ncclLLA2ACalcSlots", CommHandle::NULL, || panic!("another")), -1);
        handle.remove();
    }

    #[test]
    fn an_error_is_told_with_its_call_once() {
        let error = Error::InvalidUsage("ncclGroupEnd: not in a group call.".to_string());
        let told = line("ncclGroupEnd", CommHandle::NULL, &error);
        assert_eq!(told, "ncclGroupEnd: not in a group call. (result 5)");
        assert_eq!(line("ncclSend", CommHandle::NULL, &Error::Remote("gone".into())), "ncclSend: gone (result 6)");
    }
}
