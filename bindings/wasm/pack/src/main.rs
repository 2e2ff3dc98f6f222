//! `pack MODULE.wasm FOLDER`: the module and the ES module that calls it, `ruvllm_js.js`, into the folder.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args_os().skip(1);
    let (Some(module), Some(folder)) = (args.next(), args.next()) else {
        return Err("usage: pack MODULE.wasm FOLDER".into());
    };
    let mut bindgen = wasm_bindgen_cli_support::Bindgen::new();
    bindgen
        .input_path(module)
        .web(true)?
        .typescript(false)
        .generate(folder)?;
    Ok(())
}
