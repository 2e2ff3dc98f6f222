//! Any bytes as a file of an image, behind two that say how many tokens it may take: they are refused,
//! or a projector prepares the image and says how many tokens it will be.

#![no_main]

#[path = "../../cli/tests/serve/tiny.rs"]
mod tiny;

use libfuzzer_sys::fuzz_target;
use ruvllm::Model;
use ruvllm::gguf::Gguf;
use ruvllm::session::Part;
use ruvllm::vision::{ImageOptions, Projector};
use std::sync::LazyLock;

/// Most pixels of an image that is encoded.
const FEW: u32 = 1 << 14;

static READER: LazyLock<(Model, Projector)> = LazyLock::new(|| {
    let model = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/ruvllm-rust-6m-q8_0.gguf"
    );
    let model = Model::open(model).unwrap();
    let projector = Gguf::from_bytes(tiny::projector(256).to_bytes().unwrap()).unwrap();
    let projector = Projector::from_gguf(projector, &model).unwrap();
    projector.set_cache_budget(0);
    (model, projector)
});

fuzz_target!(|bytes: &[u8]| {
    let Some((bounds, bytes)) = bytes.split_first_chunk::<2>() else {
        return;
    };
    let image = match ruvllm_cli::decode_picture(bytes) {
        Ok(image) => image,
        Err(why) => return assert!(!why.is_empty()),
    };
    let bound = |byte: u8| (byte > 0).then_some(usize::from(byte));
    let options = ImageOptions {
        min_tokens: bound(bounds[0]),
        max_tokens: bound(bounds[1]),
    };
    let (model, projector) = &*READER;
    let engine = model.engine().unwrap();
    let reader = (projector, options);
    let parts = [Part::Image(&image), Part::Text("what is it?")];
    let Ok(n_tokens) = engine.count_parts(reader, &parts) else {
        return;
    };
    let tiles = projector.pixels(&image, options).unwrap();
    let finite = |x: &f32| x.is_finite();
    assert!(!tiles.is_empty() && tiles.iter().all(|tile| tile.values.iter().all(finite)));
    if image.width() * image.height() <= FEW {
        let cancel = ruvllm::CancelToken::default();
        let prompt = engine.encode_parts(reader, &parts, &cancel).unwrap();
        assert_eq!(prompt.tokens().len(), n_tokens);
    }
});
