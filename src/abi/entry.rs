//! What every entry of the C interface does around its body: the panic boundary, the result code, the log line.
//!
//! The table ([`super::table`]) makes each entry with the [`api`](crate::api) macro, so that none can forget it.

use super::{handles, interrupted};
use crate::communicator::group;
use crate::error::{Error, Result};
use crate::interface::pointer::Text;
use crate::interface::types::{CType, CommHandle, Status};
use crate::vendor::{self, Mode};
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
    /// What becomes of calls over the vendor's library: `forwarded`, `looked at` or `guarded`.
    pub over: &'static str,
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
pub trait Returned: CType + Sized {
    /// What the body returns.
    type Body;
    /// The C value for it.
    fn deliver(call: &'static str, comm: CommHandle, body: Self::Body) -> Self;
    /// The C value after a bug.
    fn broken() -> Self;
    /// The C value for a call on another library's communicator of what that does not have.
    fn refused(_call: &'static str, _what: &str) -> Self {
        Self::broken()
    }
    /// The C value where the vendor's library does not have the function.
    fn absent() -> Self {
        Self::broken()
    }
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

    fn refused(call: &'static str, what: &str) -> Status {
        let text =
            format!("{what} is for communicators in host memory (strataCommInitHost), and this is another library's");
        // The other library does not see the call, so the group fails in Strata's part.
        let error = Error::InvalidArgument(text);
        let _ = group::noted::<()>(Err(error.clone()));
        report(call, CommHandle::NULL, &error)
    }

    fn absent() -> Status {
        Status(Error::InvalidUsage(String::new()).code())
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

returned_as_is! { () = (), c_int = -1, Text = Text::NULL, crate::interface::layouts::Team = crate::interface::layouts::Team::NONE }

/// The only place where an error becomes a result code. It is logged here, once, with the call it came from.
fn report(call: &'static str, comm: CommHandle, error: &Error) -> Status {
    // Without a text it is of a signal handler, which takes no memory for a line either.
    if *error != Error::InProgress && !error.text().is_empty() {
        crate::log::failed(&line(call, comm, error));
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
    interrupted::begin();
    let returned = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(body) => R::deliver(call, comm, body),
        Err(panic) => {
            let error = Error::Internal(format!("a bug in Strata: {}", panic_text(panic.as_ref())));
            handles::poison(comm, &error);
            report(call, comm, &error);
            R::broken()
        }
    };
    interrupted::end();
    returned
}

/// Runs what looks at a call that the vendor's library answers. A panic is a bug of ours and ends here.
pub fn guarded<R: Returned>(call: &'static str, body: impl FnOnce() -> R) -> R {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        crate::log::failed(&format!("{call}: a bug in Strata: {}", panic_text(panic.as_ref())));
        R::broken()
    })
}

/// What is wrong with an argument that must be given and valid.
pub fn required<T: CType>(argument: &T, name: &str) -> Result<()> {
    match argument.communicator() {
        Some(comm) => handles::find(comm).map(drop),
        None => argument.required(name),
    }
}

/// Answers in the place of a library that does not have the function.
pub fn absent<R: Returned>(call: &'static str, since: &'static str) -> R {
    let text = match vendor::mode() {
        Mode::Over(library) | Mode::PassThrough(library) => {
            format!("it is not in {library}; NCCL has it since {since}")
        }
        Mode::Nobody(why) => why.clone(),
        Mode::Host => "there is no library of the vendor's".to_string(),
    };
    crate::log::failed(&format!("{call}: {text}"));
    R::absent()
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
///
/// Four functions stand behind each: `host` is Strata's own, on the host device; `over` looks at calls that the vendor's
/// library answers, where the table says so; `absent` answers where that library does not have the function. Once the
/// process has communicators of the host beside that library, `routed` tells calls on them from the others.
#[macro_export]
#[doc(hidden)]
macro_rules! api {
    // AMD's library has no twins.
    (@twin yes) => { cfg!(not(feature = "rccl")) };
    (@twin $other:ident) => { false };
    (@export rccl $name:ident $($over:tt)*) => {
        #[cfg(feature = "rccl")]
        #[unsafe(naked)]
        #[no_mangle]
        extern "C" fn $name() {
            $crate::api!(@jump $name $($over)*)
        }
    };
    (@export $other:ident $name:ident $($over:tt)*) => {
        #[unsafe(naked)]
        #[no_mangle]
        extern "C" fn $name() {
            $crate::api!(@jump $name $($over)*)
        }
    };
    (@run native, $target:expr, $($argument:ident)*) => { $target($($argument),*) };
    (@run unsupported, $why:expr, $($argument:ident)*) => {{
        let refuse = || -> $crate::error::Result<()> {
            $($crate::abi::entry::required(&$argument, stringify!($argument))?;)*
            Err($crate::error::Error::InvalidUsage($why.to_string()))
        };
        refuse()
    }};
    (@over $name:ident) => { None };
    (@over $name:ident $($over:tt)+) => { Some($crate::vendor::entry::CodeAddress(looking::$name as *const std::ffi::c_void)) };
    (@how) => { "forwarded" };
    (@how inside) => { "guarded" };
    (@how $($over:tt)+) => { "looked at" };
    (@jump $name:ident) => { $crate::jump!(forwarded entries::$name) };
    (@jump $name:ident $($over:tt)+) => { $crate::jump!(looked_at entries::$name) };
    // The vendor's function calls others of the interface.
    // Whether calls can be on a communicator of the host.
    (@routed $name:ident $($type:ty,)*) => {
        match false $(|| <$type as $crate::interface::types::CType>::IS_COMMUNICATOR)* {
            true => Some($crate::vendor::entry::CodeAddress(routed::$name as *const std::ffi::c_void)),
            false => None,
        }
    };
    (@look (inside) $vendor:ident, $($argument:ident),*) => {
        $crate::vendor::guard::inside(|| $vendor($($argument),*))
    };
    (@look ($over:path) $vendor:ident, $($argument:ident),*) => { $over($vendor, $($argument),*) };
    (@over_body $name:ident($($argument:ident: $type:ty),*) -> $result:ty;) => {};
    (@over_body $name:ident($($argument:ident: $type:ty),*) -> $result:ty; $($over:tt)+) => {
        pub extern "C" fn $name($($argument: $type),*) -> $result {
            let vendor = entries::$name.vendor();
            // SAFETY: the address must be of a function with this signature; because it is the vendor's function of this
            // name, or the one of `absent`.
            let vendor = unsafe {
                std::mem::transmute::<*const std::ffi::c_void, extern "C" fn($($type),*) -> $result>(vendor)
            };
            if $crate::vendor::guard::is_inside() {
                return vendor($($argument),*);
            }
            $crate::abi::entry::guarded(stringify!($name), || $crate::api!(@look ($($over)+) vendor, $($argument),*))
        }
    };
    (@twins yes $(fn $name:ident $(over($($over:tt)+))?;)*) => {
        #[cfg(not(feature = "rccl"))]
        mod twins {
            use super::*;
            $(
                #[unsafe(naked)]
                #[export_name = concat!("p", stringify!($name))]
                extern "C" fn $name() {
                    $crate::api!(@jump $name $($($over)+)?)
                }
            )*
        }
    };
    (@twins $other:ident $($rest:tt)*) => {};
    ($twin:ident $($section:literal { $(
        $(#[doc = $doc:literal])+
        $since:literal fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty
            = $kind:ident($target:expr) $(, over($($over:tt)+))?;
    )* })*) => {
        mod host {
            use super::*;
            $($(
                pub extern "C" fn $name($($argument: $type),*) -> $result {
                    let comm = None$(.or($crate::interface::types::CType::communicator(&$argument)))*;
                    let comm = comm.unwrap_or($crate::interface::types::CommHandle::NULL);
                    $crate::abi::entry::enter::<$result>(stringify!($name), comm, || {
                        $crate::api!(@run $kind, $target, $($argument)*)
                    })
                }
            )*)*
        }

        #[allow(unused_imports)]
        mod looking {
            use super::*;
            $($(
                $crate::api! { @over_body $name($($argument: $type),*) -> $result; $($($over)+)? }
            )*)*
        }

        #[allow(unused_imports)]
        mod routed {
            use super::*;
            $($(
                pub extern "C" fn $name($($argument: $type),*) -> $result {
                    let comm = None$(.or($crate::interface::types::CType::communicator(&$argument)))*;
                    if comm.is_some_and($crate::abi::handles::is_name) {
                        return host::$name($($argument),*);
                    }
                    let beyond = None$(.or($crate::interface::types::CType::beyond_nccl(&$argument)))*;
                    if let Some(what) = beyond {
                        return <$result as $crate::abi::entry::Returned>::refused(stringify!($name), what);
                    }
                    let next = entries::$name.next();
                    // SAFETY: the address must be of a function with this signature; because it is the one that answers
                    // such calls where there is no communicator of the host.
                    let next = unsafe {
                        std::mem::transmute::<*const std::ffi::c_void, extern "C" fn($($type),*) -> $result>(next)
                    };
                    next($($argument),*)
                }
            )*)*
        }

        #[allow(unused_imports)]
        mod absent {
            use super::*;
            $($(
                #[allow(unused_variables)]
                pub extern "C" fn $name($($argument: $type),*) -> $result {
                    $crate::abi::entry::absent(stringify!($name), $since)
                }
            )*)*
        }

        mod first {
            use super::entries;
            $($(
                #[unsafe(naked)]
                pub extern "C" fn $name() {
                    $crate::jump!(first entries::$name)
                }
            )*)*
        }

        #[allow(non_upper_case_globals)]
        mod entries {
            use super::*;
            use $crate::vendor::entry::{CodeAddress, Entry};
            use std::ffi::{c_void, CStr};
            $($(
                pub static $name: Entry = Entry::new(
                    match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => c"",
                    },
                    first::$name as *const c_void,
                    CodeAddress(host::$name as *const c_void),
                    $crate::api!(@over $name $($($over)+)?),
                    $crate::api!(@routed $name $($type,)*),
                    CodeAddress(absent::$name as *const c_void),
                );
            )*)*
        }

        // Both names lead through the entry, never to each other: a profiler that takes the place of one of them calls
        // the other.
        $($(
            $crate::api! { @export $twin $name $($($over)+)? }
        )*)*

        $crate::api!(@twins $twin $($(fn $name $(over($($over)+))?;)*)*);

        /// Where the calls of the functions declared here go.
        pub const ENTRIES: &[&$crate::vendor::entry::Entry] = &[$($(&entries::$name,)*)*];

        /// The functions declared here.
        pub const FUNCTIONS: &[$crate::abi::entry::Function] = &[$($($crate::abi::entry::Function {
            name: stringify!($name),
            since: $since,
            kind: stringify!($kind),
            over: $crate::api!(@how $($($over)+)?),
            twin: $crate::api!(@twin $twin),
            section: $section,
            doc: &[$($doc),+],
            result: <$result as $crate::interface::types::CType>::c,
            arguments: &[$((stringify!($argument), <$type as $crate::interface::types::CType>::c)),*],
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
