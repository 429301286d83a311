//! Python's pickle, protocol 2, as far as a flight recorder's dump needs it.
#![forbid(unsafe_code)]

/// A value of Python's.
#[derive(Debug, Clone, PartialEq)]
pub enum PyValue {
    /// `None`
    None,
    /// `True` or `False`
    Bool(bool),
    /// An `int`.
    Int(i64),
    /// A `str`.
    Str(String),
    /// A `tuple` of two.
    Pair(Box<[PyValue; 2]>),
    /// A `list`.
    List(Vec<PyValue>),
    /// A `dict`, in this order.
    Dict(Vec<(PyValue, PyValue)>),
}

impl PyValue {
    /// A `str`.
    pub fn text(text: &str) -> PyValue {
        PyValue::Str(text.to_string())
    }

    /// An `int`; of what is too large for 64 bits the largest.
    pub fn number(number: u64) -> PyValue {
        PyValue::Int(i64::try_from(number).unwrap_or(i64::MAX))
    }

    /// A `dict` whose keys are texts.
    pub fn dict<const N: usize>(entries: [(&str, PyValue); N]) -> PyValue {
        PyValue::Dict(entries.into_iter().map(|(key, value)| (PyValue::text(key), value)).collect())
    }

    /// The value's bytes, as `pickle.load` reads them.
    pub fn pickled(&self) -> Vec<u8> {
        let mut out = b"\x80\x02".to_vec();
        self.put(&mut out);
        out.push(b'.');
        out
    }

    fn put(&self, out: &mut Vec<u8>) {
        match self {
            PyValue::None => out.push(b'N'),
            PyValue::Bool(value) => out.push(if *value { 0x88 } else { 0x89 }),
            PyValue::Int(value) => match i32::try_from(*value) {
                Ok(small) => {
                    out.push(b'J');
                    out.extend(small.to_le_bytes());
                }
                Err(_) => {
                    out.extend([0x8a, 8]);
                    out.extend(value.to_le_bytes());
                }
            },
            PyValue::Str(text) => {
                out.push(b'X');
                out.extend((text.len() as u32).to_le_bytes());
                out.extend(text.as_bytes());
            }
            PyValue::Pair(pair) => {
                pair.iter().for_each(|value| value.put(out));
                out.push(0x86);
            }
            PyValue::List(values) => {
                out.extend(b"](");
                values.iter().for_each(|value| value.put(out));
                out.push(b'e');
            }
            PyValue::Dict(entries) => {
                out.extend(b"}(");
                for (key, value) in entries {
                    key.put(out);
                    value.put(out);
                }
                out.push(b'u');
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    #[test]
    fn python_reads_what_is_written() {
        let value = PyValue::dict([
            ("none", PyValue::None),
            ("yes", PyValue::Bool(true)),
            ("no", PyValue::Bool(false)),
            ("numbers", PyValue::List([0, -1, 1 << 31, -(1 << 40), i64::MAX].map(PyValue::Int).to_vec())),
            ("empty", PyValue::List(Vec::new())),
            ("text", PyValue::text("zwölf")),
            ("pair", PyValue::Pair(Box::new([PyValue::Int(1), PyValue::text("")]))),
        ]);
        let script = "import pickle, sys; print(pickle.load(sys.stdin.buffer))";
        let mut python = Command::new("python3");
        python.args(["-c", script]).env("PYTHONIOENCODING", "utf-8");
        let Ok(mut child) = python.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn() else {
            return println!("SKIPPED: there is no python3");
        };
        child.stdin.take().unwrap().write_all(&value.pickled()).unwrap();
        let said = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        let expected = "{'none': None, 'yes': True, 'no': False, \
                        'numbers': [0, -1, 2147483648, -1099511627776, 9223372036854775807], \
                        'empty': [], 'text': 'zwölf', 'pair': (1, '')}";
        assert_eq!(said.trim(), expected);
    }
}
