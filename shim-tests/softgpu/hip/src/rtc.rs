//! `hiprtc`: its code is the source after the preprocessor, in which the kernels have their names.
#![allow(non_snake_case)]

use softgpu::entry::put;
use softgpu::fault::{Code, Result};
use softgpu::handles::Handles;
use std::ffi::{c_char, CStr};
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

const INVALID_INPUT: Code = Code(3);
const INVALID_PROGRAM: Code = Code(4);
const COMPILATION: Code = Code(6);

struct Program {
    source: String,
    made: Mutex<Made>,
}

#[derive(Default)]
struct Made {
    code: Option<String>,
    log: String,
}

static PROGRAMS: Handles<Program> = Handles::empty();

fn find(program: usize) -> Result<Arc<Program>> {
    PROGRAMS.get(program).ok_or(INVALID_PROGRAM)
}

/// The source with its macros replaced, and what the preprocessor said. Where there is none the source stays as it is.
fn preprocessed(source: &str) -> std::result::Result<String, String> {
    let mut cc = Command::new("cc");
    cc.args(["-E", "-P", "-xc++", "-D__HIPCC__", "-D__HIPCC_RTC__", "-D__HIP_PLATFORM_AMD__", "-"]);
    cc.env_remove("LD_PRELOAD").env_remove("LD_LIBRARY_PATH");
    cc.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let Ok(mut child) = cc.spawn() else { return Ok(source.to_string()) };
    let mut stdin = child.stdin.take().expect("a pipe");
    let text = source.to_string();
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()));
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    let _ = writer.join();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    if output.status.success() {
        Ok(text(output.stdout))
    } else {
        Err(text(output.stderr))
    }
}

/// Stores a text with its final 0.
fn put_all(out: *mut c_char, text: &str) -> Result {
    for (index, byte) in text.bytes().chain([0]).enumerate() {
        put(out.wrapping_add(index).cast(), byte)?;
    }
    Ok(())
}

/// What an error means.
#[no_mangle]
pub extern "C" fn hiprtcGetErrorString(code: i32) -> *const c_char {
    match code {
        0 => c"HIPRTC_SUCCESS".as_ptr(),
        3 => c"HIPRTC_ERROR_INVALID_INPUT".as_ptr(),
        4 => c"HIPRTC_ERROR_INVALID_PROGRAM".as_ptr(),
        6 => c"HIPRTC_ERROR_COMPILATION".as_ptr(),
        _ => c"Invalid HIPRTC error code".as_ptr(),
    }
}

softgpu::exports! { any_time:
    fn hiprtcVersion(major: *mut i32, minor: *mut i32) {
        put(major, 6)?;
        put(minor, 4)
    }
    fn hiprtcCreateProgram(
        program: *mut usize,
        source: *const c_char,
        _name: *const c_char,
        headers: i32,
        _texts: *const *const c_char,
        _names: *const *const c_char,
    ) {
        if source.is_null() || headers != 0 {
            return Err(INVALID_INPUT);
        }
        // SAFETY: a 0 must follow; because the program promises that of a text.
        let source = unsafe { CStr::from_ptr(source) }.to_string_lossy().into_owned();
        put(program, PROGRAMS.add(Program { source, made: Mutex::default() }))
    }
    fn hiprtcCompileProgram(program: usize, _options: i32, _texts: *const *const c_char) {
        let program = find(program)?;
        let result = preprocessed(&program.source);
        let mut made = program.made.lock().unwrap();
        match result {
            Ok(code) => {
                *made = Made { code: Some(code), log: String::new() };
                Ok(())
            }
            Err(log) => {
                *made = Made { code: None, log };
                Err(COMPILATION)
            }
        }
    }
    fn hiprtcGetCodeSize(program: usize, bytes: *mut usize) {
        let program = find(program)?;
        let made = program.made.lock().unwrap();
        put(bytes, made.code.as_ref().ok_or(INVALID_PROGRAM)?.len() + 1)
    }
    fn hiprtcGetCode(program: usize, code: *mut c_char) {
        let program = find(program)?;
        let made = program.made.lock().unwrap();
        put_all(code, made.code.as_ref().ok_or(INVALID_PROGRAM)?)
    }
    fn hiprtcGetProgramLogSize(program: usize, bytes: *mut usize) {
        put(bytes, find(program)?.made.lock().unwrap().log.len() + 1)
    }
    fn hiprtcGetProgramLog(program: usize, log: *mut c_char) {
        put_all(log, &find(program)?.made.lock().unwrap().log)
    }
    fn hiprtcDestroyProgram(program: *mut usize) {
        let handle = softgpu::entry::element(program, 0)?;
        PROGRAMS.remove(handle).ok_or(INVALID_PROGRAM)?;
        put(program, 0)
    }
}
