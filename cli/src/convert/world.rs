//! RWKV's vocabulary of world languages: lines such as `257 '\n\n' 2` with a number, a literal of
//! Python and its bytes.

/// Name of the file.
pub(super) const FILE: &str = "rwkv_vocab_v20230424.txt";

/// Chat template of models without one: names of the speakers and empty lines.
pub(super) const TEMPLATE: &str = "\
{{- bos_token -}}
{%- for message in messages -%}
{{- {'system': 'System', 'user': 'User', 'assistant': 'Assistant'}[message.role] + ': ' -}}
{%- set text = message.content or '' -%}
{{- text.split('</think>')[-1].strip() + '\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}Assistant:{%- endif -%}";

/// The texts of the tokens from 1 on, in the form that GGUF files have; `None` if the file is
/// damaged.
pub(super) fn tokens(file: &[u8]) -> Option<Vec<Vec<u8>>> {
    let token = |(i, line): (usize, &str)| {
        let (id, rest) = line.split_once(' ')?;
        let (text, n_bytes) = rest.rsplit_once(' ')?;
        let bytes = literal(text)?;
        (id.parse() == Ok(i + 1) && n_bytes.parse() == Ok(bytes.len())).then(|| escaped(&bytes))
    };
    // Not `lines`, as other marks of a line's end are tokens.
    str::from_utf8(file)
        .ok()?
        .split_terminator('\n')
        .enumerate()
        .map(token)
        .collect()
}

/// The bytes of a literal of Python: `'text'`, `"text"` or `b'bytes'`.
fn literal(source: &str) -> Option<Vec<u8>> {
    let bytes = source.strip_prefix('b');
    let quoted = bytes.unwrap_or(source);
    let quote = quoted.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    let mut chars = quoted.strip_prefix(quote)?.strip_suffix(quote)?.chars();
    let mut out = Vec::new();
    while let Some(c) = chars.next() {
        let c = match c {
            '\\' => match chars.next()? {
                'a' => '\x07',
                'b' => '\x08',
                't' => '\t',
                'n' => '\n',
                'v' => '\x0b',
                'f' => '\x0c',
                'r' => '\r',
                c @ ('x' | 'u' | 'U') => {
                    let n = match c {
                        'x' => 2,
                        'u' => 4,
                        _ => 8,
                    };
                    let digits: String = chars.by_ref().take(n).collect();
                    let code = u32::from_str_radix(&digits, 16)
                        .ok()
                        .filter(|_| digits.len() == n)?;
                    char::from_u32(code)?
                }
                c @ ('\\' | '\'' | '"') => c,
                _ => return None,
            },
            c => c,
        };
        match bytes {
            Some(_) => out.push(u8::try_from(c).ok()?),
            None => out.extend(c.encode_utf8(&mut [0; 4]).bytes()),
        }
    }
    Some(out)
}

/// Bytes as Python writes them, without the quotes around.
fn escaped(bytes: &[u8]) -> Vec<u8> {
    // Python takes double quotes then.
    let has_plain_quotes = bytes.contains(&b'\'') && !bytes.contains(&b'"');
    let mut out = Vec::new();
    for &byte in bytes {
        match byte {
            b'\t' => out.extend(br"\t"),
            b'\n' => out.extend(br"\n"),
            b'\r' => out.extend(br"\r"),
            b'\\' => out.extend(br"\\"),
            b'\'' if !has_plain_quotes => out.extend(br"\'"),
            b' '..=b'~' => out.push(byte),
            _ => out.extend(format!(r"\x{byte:02x}").bytes()),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_of_python() {
        let file = "1 '\\x00' 1\n2 b'\\xe4\\xb8' 2\n3 'é\\u00e9' 4\n4 \"'\" 1\n5 '\"\\'' 2\n6 '\\\\ \\n' 3\n7 ' ' 1\n8 '\u{2028}' 3\n";
        let expected: [&[u8]; 8] = [
            br"\x00",
            br"\xe4\xb8",
            br"\xc3\xa9\xc3\xa9",
            b"'",
            br#""\'"#,
            br"\\ \n",
            b" ",
            br"\xe2\x80\xa8",
        ];
        assert_eq!(tokens(file.as_bytes()).unwrap(), expected);
        for damaged in [
            "1 'a' 2",
            "2 'a' 1",
            "1 'a 1",
            "1 a 1",
            "1 '",
            "1 '\\q' 1",
            "1 '\\x1' 1",
            "1 b'é\\u0100' 2",
            "",
            " ",
        ] {
            assert_eq!(tokens(format!("{damaged}\n").as_bytes()), None, "{damaged}");
        }
        assert_eq!(tokens(b"1 '\xff' 1"), None);
    }
}
