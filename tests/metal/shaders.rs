//! Shaders as C++ that `emulator/msl.h` understands, and what their kernels declare.
//!
//! Little has to change: threadgroup variables become static objects that the emulator knows,
//! kernels get a table of their parameters, and instantiations are registered by name. What MSL
//! forbids and C++ allows is refused where shaders are apt to use it; clang does the rest.

use std::path::{Path, PathBuf};

/// A parameter of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Parameter {
    /// A pointer or reference in a buffer.
    Buffer {
        space: String,
        constant: bool,
        element: String,
        name: String,
        index: u32,
    },
    /// A value such as `thread_index_in_threadgroup`.
    Builtin { name: String },
}

/// A kernel function, template or not.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) template: bool,
    pub(crate) parameters: Vec<Parameter>,
}

/// A structure of scalars: its name, and names and types of its fields.
#[derive(Debug)]
pub(crate) struct Structure {
    pub(crate) name: String,
    pub(crate) fields: Vec<(String, String)>,
}

/// A shader file, translated.
pub(crate) struct Translated {
    pub(crate) text: String,
    pub(crate) kernels: Vec<Kernel>,
    pub(crate) structures: Vec<Structure>,
}

/// The folder of the shaders.
pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/metal_shaders")
}

/// Every file of the folder with this extension, by name.
pub(crate) fn files(extension: &str) -> Vec<(String, String)> {
    let mut files: Vec<(String, String)> = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == extension))
        .map(|path| {
            (
                path.file_name().unwrap().to_str().unwrap().to_string(),
                std::fs::read_to_string(&path).unwrap(),
            )
        })
        .collect();
    files.sort();
    files
}

/// Words that C++ has and MSL has not.
const FORBIDDEN: &[&str] = &[
    "double",
    "new",
    "delete",
    "goto",
    "std",
    "malloc",
    "printf",
    "throw",
    "try",
    "virtual",
    "dynamic_cast",
    "typeid",
    "thread_local",
    "asm",
    "long",
];

/// `text` with comments blanked, every other character at its place.
fn without_comments(text: &str) -> String {
    let mut lines = Vec::new();
    for line in text.lines() {
        let code = line.split("//").next().unwrap_or("");
        lines.push(format!("{code}{}", " ".repeat(line.len() - code.len())));
    }
    lines.join("\n")
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Words and numbers of a line with what follows each.
fn words(line: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    let mut rest = line;
    while let Some(start) = rest.find(is_word) {
        let tail = &rest[start..];
        let number = tail.starts_with(|c: char| c.is_ascii_digit());
        let end = tail
            .find(|c: char| !(is_word(c) || number && c == '.'))
            .unwrap_or(tail.len());
        found.push((&tail[..end], &tail[end..]));
        rest = &tail[end..];
    }
    found
}

/// What is wrong with the line, beyond what clang sees.
fn lint(line: &str) -> Result<(), String> {
    if line.trim_start().starts_with('#') {
        return Ok(());
    }
    for (word, rest) in words(line) {
        if FORBIDDEN.contains(&word) {
            return Err(format!("`{word}` is not MSL"));
        }
        // `1.0` is a float in MSL and a double in C++; `1.0f` is a float in both.
        let decimal = word.starts_with(|c: char| c.is_ascii_digit()) && !word.starts_with("0x");
        let float = word.contains('.') || word.contains('e') && !word.ends_with('u');
        if decimal
            && float
            && !word.ends_with('f')
            && !(word.ends_with('e') && rest.starts_with('-'))
        {
            return Err(format!("`{word}` needs the suffix f"));
        }
    }
    for vector in [
        "float4", "float2", "half4", "uint4", "uint2", "uchar4", "char4",
    ] {
        if line.contains(&format!("({vector})")) {
            return Err(format!(
                "write `{vector}(x)`: clang takes a cast for the same bits"
            ));
        }
    }
    Ok(())
}

/// `threadgroup T name[n];` as type, name and size.
fn threadgroup_variable(line: &str) -> Option<(&str, &str, &str)> {
    let rest = line
        .trim()
        .strip_prefix("threadgroup ")?
        .strip_suffix("];")?;
    let (declared, size) = rest.split_once('[')?;
    let (element, name) = declared.split_once(' ')?;
    (name.chars().all(is_word) && element.chars().all(is_word)).then_some((element, name, size))
}

/// Where the bracket at the beginning of `text` is closed.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0;
    for (i, c) in text.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(i);
        }
    }
    None
}

/// Splits at commas outside of brackets.
fn arguments(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0, 0);
    for (i, c) in text.char_indices() {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[start..i].trim());
                start = i + 1;
            }
            _ => {}
        }
    }
    parts.push(text[start..].trim());
    parts
}

/// `device const float* x [[buffer(0)]]`, or `uint t [[thread_index_in_threadgroup]]`.
fn parameter(text: &str) -> Result<Parameter, String> {
    let wrong = || format!("parameter `{text}`");
    let (declared, attribute) = text
        .strip_suffix("]]")
        .and_then(|t| t.split_once("[["))
        .ok_or_else(wrong)?;
    let Some(index) = attribute
        .strip_prefix("buffer(")
        .and_then(|t| t.strip_suffix(')'))
    else {
        return Ok(Parameter::Builtin {
            name: attribute.to_string(),
        });
    };
    let (types, name) = declared.trim().split_once(['*', '&']).ok_or_else(wrong)?;
    let types: Vec<&str> = types.split_whitespace().collect();
    let [space, between @ .., element] = &types[..] else {
        return Err(wrong());
    };
    if !["device", "constant"].contains(space) {
        return Err(format!("{}: no address space", wrong()));
    }
    Ok(Parameter::Buffer {
        space: space.to_string(),
        constant: *space == "constant" || between == ["const"],
        element: element.to_string(),
        name: name.trim().to_string(),
        index: index.parse().map_err(|_| wrong())?,
    })
}

fn kernels(code: &str) -> Result<Vec<Kernel>, String> {
    let mut kernels = Vec::new();
    for (at, _) in code.match_indices("kernel void ") {
        let rest = &code[at + "kernel void ".len()..];
        let open = rest.find('(').ok_or("a kernel without parameters")?;
        let close = open + closing(&rest[open..]).ok_or("an open bracket")?;
        let parameters = arguments(&rest[open + 1..close])
            .into_iter()
            .map(parameter)
            .collect::<Result<_, _>>()?;
        let template = code[..at].trim_end().ends_with('>');
        kernels.push(Kernel {
            name: rest[..open].to_string(),
            template,
            parameters,
        });
    }
    Ok(kernels)
}

fn structures(code: &str) -> Vec<Structure> {
    let mut structures = Vec::new();
    for (at, _) in code.match_indices("struct ") {
        let rest = &code[at + "struct ".len()..];
        let Some((name, body)) = rest.split_once('{') else {
            continue;
        };
        let Some((body, _)) = body.split_once('}') else {
            continue;
        };
        let fields = body
            .split(';')
            .filter_map(|field| field.trim().split_once(' '));
        let fields = fields
            .map(|(of, name)| (name.trim().to_string(), of.to_string()))
            .collect();
        structures.push(Structure {
            name: name.trim().to_string(),
            fields,
        });
    }
    structures
}

/// Translates a shader file. `types` for the compilation that checks address spaces; `format` keeps
/// only the kernels of one weight format.
pub(crate) fn translate(
    file: &str,
    text: &str,
    types: bool,
    format: Option<&str>,
) -> Result<Translated, String> {
    let code = without_comments(text);
    let mut lines = Vec::new();
    for (i, line) in code.lines().enumerate() {
        lint(line).map_err(|e| format!("{file}:{}: error: {e}", i + 1))?;
        lines.push(if let Some((element, name, size)) = threadgroup_variable(line) {
            if types {
                format!("static {}", line.trim())
            } else {
                format!(
                    "static msl::Shared<{element}[{size}]> {name}_; auto& {name} = msl::declare({name}_, \"{name}\");"
                )
            }
        } else if let Some(format) = format.filter(|_| line.starts_with("#define FOR_FORMATS(X)")) {
            format!("#define FOR_FORMATS(X) X({format})")
        } else {
            line.replace(
                "template [[host_name(name)]] [[kernel]] decltype(function<__VA_ARGS__>) function<__VA_ARGS__>;",
                "MSL_REGISTER(name, MSL_JOIN(registration_, __COUNTER__), function##_parameters, function<__VA_ARGS__>)",
            )
        });
    }
    let kernels = kernels(&code).map_err(|e| format!("{file}: error: {e}"))?;
    let mut text = String::from("#include <metal_stdlib>\n");
    for kernel in &kernels {
        let parameters: Vec<String> = kernel
            .parameters
            .iter()
            .map(|parameter| match parameter {
                Parameter::Buffer { index, .. } => format!("{{nullptr, {index}}}"),
                Parameter::Builtin { name } => format!("{{\"{name}\", 0}}"),
            })
            .collect();
        let name = &kernel.name;
        text += &format!(
            "static const msl::Parameter {name}_parameters[] = {{{}}};\n",
            parameters.join(", ")
        );
    }
    text += &format!("#line 1 \"{file}\"\n{}\n", lines.join("\n"));
    for kernel in kernels.iter().filter(|kernel| !kernel.template) {
        let name = &kernel.name;
        text +=
            &format!("MSL_REGISTER(\"{name}\", registration_{name}, {name}_parameters, {name})\n");
    }
    if file.ends_with(".h") {
        text = format!("#line 1 \"{file}\"\n{}\n", lines.join("\n"));
    }
    Ok(Translated {
        text,
        kernels,
        structures: structures(&code),
    })
}
