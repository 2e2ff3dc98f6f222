//! Puts the Metal shaders together and compiles them where Apple's compiler is; elsewhere there is
//! nothing to do.

use std::path::{Path, PathBuf};
use std::process::{Command, exit};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(metallib)");
    let is = |name: &str, value: &str| std::env::var(name).is_ok_and(|v| v == value);
    if std::env::var_os("CARGO_FEATURE_METAL").is_none() || !is("CARGO_CFG_TARGET_VENDOR", "apple")
    {
        return;
    }
    println!("cargo::rerun-if-changed=src/metal_shaders");
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    let (source, compiled) = (folder.join("ruvllm.metal"), folder.join("ruvllm.metallib"));
    if let Err(e) =
        library(Path::new("src/metal_shaders")).and_then(|text| std::fs::write(&source, text))
    {
        eprintln!("src/metal_shaders: {e}");
        exit(1);
    }
    // Xcode's compiler; without it the program compiles the source when it starts.
    let sdk = if is("CARGO_CFG_TARGET_OS", "ios") {
        "iphoneos"
    } else {
        "macosx"
    };
    if !Command::new("xcrun")
        .args(["-sdk", sdk, "--find", "metal"])
        .output()
        .is_ok_and(|o| o.status.success())
    {
        return;
    }
    let status = Command::new("xcrun")
        .args([
            "-sdk",
            sdk,
            "metal",
            "-std=metal3.0",
            "-fno-fast-math",
            "-O2",
            "-o",
        ])
        .args([&compiled, &source])
        .status();
    if !status.is_ok_and(|status| status.success()) {
        exit(1); // the compiler has said why
    }
    println!("cargo::rustc-cfg=metallib");
}

/// All shaders as one text: every header once, before what includes it.
pub(crate) fn library(folder: &Path) -> std::io::Result<String> {
    fn add(
        folder: &Path,
        name: &str,
        added: &mut Vec<String>,
        text: &mut String,
    ) -> std::io::Result<()> {
        if added.iter().any(|other| other == name) {
            return Ok(());
        }
        added.push(name.to_string());
        let file = std::fs::read_to_string(folder.join(name))?;
        let mut code = format!("#line 1 \"{name}\"\n");
        for line in file.lines() {
            let header = line
                .strip_prefix("#include \"")
                .and_then(|rest| rest.strip_suffix('"'));
            if let Some(header) = header {
                add(folder, header, added, text)?;
            }
            code += if header.is_some() || line == "#pragma once" {
                ""
            } else {
                line
            };
            code += "\n";
        }
        *text += &code;
        Ok(())
    }

    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        names.extend(
            entry?
                .file_name()
                .into_string()
                .ok()
                .filter(|name| name.ends_with(".metal")),
        );
    }
    names.sort();
    let (mut added, mut text) = (Vec::new(), String::new());
    for name in names {
        add(folder, &name, &mut added, &mut text)?;
    }
    Ok(text)
}
