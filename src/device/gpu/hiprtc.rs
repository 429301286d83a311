//! AMD's run-time compiler: the kernels' source becomes code for the device at hand when it is first needed.

use super::driver::Driver;
use crate::error::{Error, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_char, c_int, CStr, CString};
use std::path::PathBuf;
use std::ptr::{null, null_mut};

/// `hiprtcProgram`
type Program = usize;
/// `hiprtcResult`
type Status = c_int;

const SUCCESS: Status = 0;
/// What the library is called beside the runtime's.
const NAMES: [&str; 4] = ["libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5"];
/// Products and sums are rounded one by one, as on the host.
const OPTIONS: [&CStr; 3] = [c"-O3", c"-std=c++17", c"-ffp-contract=off"];

macro_rules! functions {
    ($($name:ident: unsafe extern "C" fn($($type:ty),*) = $symbol:literal;)*) => {
        /// The compiler's functions.
        struct Compiler {
            $($name: unsafe extern "C" fn($($type),*) -> Status,)*
        }

        impl Compiler {
            fn of(library: &Library) -> Option<Compiler> {
                Some(Compiler { $(
                    // SAFETY: the symbol must be a function with this signature; because the interface says so of its
                    // name.
                    $name: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }.ok()?,
                )* })
            }
        }
    };
}

functions! {
    create: unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char)
        = "hiprtcCreateProgram";
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) = "hiprtcCompileProgram";
    code_size: unsafe extern "C" fn(Program, *mut usize) = "hiprtcGetCodeSize";
    code: unsafe extern "C" fn(Program, *mut c_char) = "hiprtcGetCode";
    log_size: unsafe extern "C" fn(Program, *mut usize) = "hiprtcGetProgramLogSize";
    log: unsafe extern "C" fn(Program, *mut c_char) = "hiprtcGetProgramLog";
    destroy: unsafe extern "C" fn(*mut Program) = "hiprtcDestroyProgram";
}

/// The compiler that belongs to a runtime: in the same file, or in one beside it.
fn compiler(driver: &Driver) -> Option<Compiler> {
    let beside = NAMES.iter().map(|name| driver.path.with_file_name(name)).filter(|path| path.exists());
    let candidates: Vec<PathBuf> = beside.chain(NAMES.iter().map(PathBuf::from)).chain([driver.path.clone()]).collect();
    candidates.iter().find_map(|path| {
        // SAFETY: the initialisers must be fit to run now; because they are those of the runtime's own compiler.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.ok()?;
        let compiler = Compiler::of(&library)?;
        // It stays: its threads may outlive us.
        std::mem::forget(library);
        Some(compiler)
    })
}

/// Compiles a source for the device that is current on this thread.
pub fn compile(driver: &Driver, source: &str) -> Result<Vec<u8>> {
    let failed = |what: &str| Error::Device(format!("compiling kernels with hiprtc: {what}"));
    let compiler = compiler(driver).ok_or_else(|| failed("there is no libhiprtc.so beside the HIP runtime"))?;
    compile_by(&compiler, source, &OPTIONS).map_err(|what| failed(&what))
}

fn compile_by(compiler: &Compiler, source: &str, options: &[&CStr]) -> std::result::Result<Vec<u8>, String> {
    let source = CString::new(source).map_err(|_| "the source has a zero byte")?;
    let mut program = 0;
    // SAFETY: the places and texts must be valid; because they are locals, and no headers are given.
    let status = unsafe { (compiler.create)(&mut program, source.as_ptr(), c"strata".as_ptr(), 0, null(), null()) };
    if status != SUCCESS {
        return Err(format!("error {status}"));
    }
    let outcome = build(compiler, program, options);
    // SAFETY: the program must be one; because it was made above.
    unsafe { (compiler.destroy)(&mut program) };
    outcome
}

fn build(compiler: &Compiler, program: Program, options: &[&CStr]) -> std::result::Result<Vec<u8>, String> {
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    // SAFETY: the options must be texts; because they are borrowed until the call is over.
    let status = unsafe { (compiler.compile)(program, options.len() as c_int, options.as_ptr()) };
    if status != SUCCESS {
        let log = read(
            |bytes| {
                // SAFETY: the place must be valid; because it is a local of the caller.
                unsafe { (compiler.log_size)(program, bytes) }
            },
            |place| {
                // SAFETY: the place must have so many bytes; because `read` made it so.
                unsafe { (compiler.log)(program, place) }
            },
        );
        let log = log.map_or_else(|status| format!("error {status}"), |log| String::from_utf8_lossy(&log).into_owned());
        return Err(format!("error {status}: {log}"));
    }
    let code = read(
        |bytes| {
            // SAFETY: the place must be valid; because it is a local of the caller.
            unsafe { (compiler.code_size)(program, bytes) }
        },
        |place| {
            // SAFETY: the place must have so many bytes; because `read` made it so.
            unsafe { (compiler.code)(program, place) }
        },
    );
    code.map_err(|status| format!("error {status}"))
}

/// Something that the compiler writes, whose length it tells.
fn read(
    length: impl FnOnce(*mut usize) -> Status,
    write: impl FnOnce(*mut c_char) -> Status,
) -> std::result::Result<Vec<u8>, Status> {
    let mut bytes = 0;
    match length(&mut bytes) {
        SUCCESS => {}
        status => return Err(status),
    }
    let mut text = vec![0u8; bytes];
    let place = if bytes == 0 { null_mut() } else { text.as_mut_ptr().cast() };
    match write(place) {
        SUCCESS => Ok(text),
        status => Err(status),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{code, kernels};
    use super::*;
    use crate::dtype::DataType;
    use std::path::Path;
    use std::process::Command;

    /// Names AMD's runtime to the process that opens it: it stays in the process, where Strata's other tests would find it.
    const RUNTIME: &str = "TEST_HIP_RUNTIME";

    /// The life of that process.
    #[test]
    fn a_process_with_amd_s_compiler_compiles_every_source() {
        let Some(path) = std::env::var_os(RUNTIME) else { return };
        // SAFETY: the initialisers must be fit to run now; because the process does nothing else.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.expect("the runtime can be opened");
        let compiler = Compiler::of(&library).expect("it has the compiler's functions");
        std::mem::forget(library);
        let options = [&OPTIONS[..], &[c"--offload-arch=gfx90a"]].concat();
        let types = DataType::ALL.iter().map(|dtype| (code::hip_source(*dtype), kernels::scale(*dtype)));
        for (source, kernel) in types.chain([(code::hip_move_source(), kernels::SHUFFLE.to_string())]) {
            let code = compile_by(&compiler, &source, &options).unwrap_or_else(|why| panic!("{kernel}: {why}"));
            assert!(code.starts_with(b"\x7fELF"), "{kernel}: {:02x?}", &code[..16]);
            assert!(code.windows(kernel.len()).any(|part| part == kernel.as_bytes()), "{kernel} is not in the code");
            println!("compiled: {kernel}");
        }
        let why = compile_by(&compiler, "void f() { nothing; }", &options).expect_err("it does not compile");
        assert!(why.contains("undeclared identifier 'nothing'"), "{why}");
    }

    #[test]
    fn amd_s_own_compiler_takes_every_source() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/hip");
        let runtime = folder.join("libamdhip64.so.5");
        if !runtime.exists() {
            println!("SKIPPED: AMD's hiprtc is not there; scripts/fetch-hip fetches it where Debian has it");
            return;
        }
        let name = "device::gpu::hiprtc::tests::a_process_with_amd_s_compiler_compiles_every_source";
        // It takes ten seconds.
        let mut command = Command::new("timeout");
        command.arg("200").arg(std::env::current_exe().expect("this program has a path"));
        command.args(["--exact", name, "--nocapture"]).env("LD_LIBRARY_PATH", folder).env(RUNTIME, runtime);
        let output = command.output().expect("this program starts");
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert_eq!(said.matches("compiled: ").count(), DataType::ALL.len() + 1, "{said}");
    }
}
