//! `ruvllm vision`: what a model sees of an image, for comparison with other engines.

use crate::flags::{ImageArgs, ModelArgs, PlacementArgs, SessionArgs, parts, session};
use crate::io::Failure;
use ruvllm::KvType;
use ruvllm::session::EncodedPrompt;
use ruvllm::vision::LayoutPart;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  ruvllm vision -m model.gguf --mmproj mmproj.gguf --image cat.png -o seen
  ruvllm vision -m model.gguf --image a.png --image b.jpg -p \"Compare <__media__> and <__media__>\" -o seen

Writes pixelsN.f32, the normalised pixels of each image or tile (3, height, width); embeddings.f32, \
those of all images one after the other; and layout.json: shapes, texts around embeddings, tokens, positions.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Prompt around the images, with a marker for each
    #[arg(
        short,
        long,
        value_name = "TEXT",
        default_value = "",
        allow_hyphen_values = true
    )]
    prompt: String,
    /// Folder to write
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    session: SessionArgs,
    #[command(flatten)]
    images: ImageArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    if !args.images.has_images() {
        return Err(Failure::Usage("no image: give --image FILE".into()));
    }
    let images = args.images.images()?;
    let model = args.model.open(&args.placement)?;
    let options = args.session.options(None, KvType::F32);
    let mut session = session(&model, &args.session, &options, 1)?;
    let projector = args
        .images
        .prepare(&args.model, &args.session, &mut session)?;
    let (options, cancel) = (args.images.options(), session.cancel_token());
    std::fs::create_dir_all(&args.output).map_err(Failure::file(&args.output))?;
    let (mut tiles, mut of_images, mut rows) = (Vec::new(), Vec::new(), Vec::new());
    let mut width = 0;
    for (i, image) in images.iter().enumerate() {
        for pixels in projector.pixels(image, options)? {
            let name = format!("pixels{}.f32", tiles.len());
            write(&args.output.join(&name), &pixels.values)?;
            tiles.push(
                json!({ "file": name, "shape": [3, pixels.height, pixels.width], "image": i }),
            );
        }
        let encoded = session
            .engine()
            .encode_image(&projector, image, options, &cancel);
        let encoded = encoded.map_err(ruvllm::Error::from)?;
        let piece = |piece: &LayoutPart| match piece {
            LayoutPart::Text(text) => json!(["text", text]),
            LayoutPart::Embeddings(n) => json!(["image", n]),
            _ => Value::Null,
        };
        let pieces = projector.pieces(&encoded, i);
        of_images.push(json!({
            "width": image.width(),
            "height": image.height(),
            "n_tokens": encoded.n(),
            "grid": [encoded.cells().0, encoded.cells().1],
            "pieces": pieces.iter().map(piece).collect::<Vec<_>>(),
        }));
        width = encoded.width();
        rows.extend_from_slice(encoded.embeddings());
    }
    write(&args.output.join("embeddings.f32"), &rows)?;
    let parts = parts(&projector, &args.prompt, &images)?;
    let prompt = session
        .images()
        .encode(&parts)
        .map_err(ruvllm::Error::from)?;
    let layout = json!({
        "projector": projector.kind(),
        "preprocessed": tiles,
        "embeddings": { "file": "embeddings.f32", "shape": [rows.len() / width.max(1), width] },
        "images": of_images,
        "image_token_id": projector.placeholder(),
        "input_ids": prompt.tokens(),
        "runs": runs(&prompt),
        "positions_thw": positions(&prompt),
    });
    let path = args.output.join("layout.json");
    std::fs::write(&path, format!("{layout:#}\n")).map_err(Failure::file(&path))
}

/// Runs of tokens, and numbers of embeddings.
fn runs(prompt: &EncodedPrompt) -> Vec<Value> {
    let (mut runs, mut end) = (Vec::new(), 0);
    for image in prompt.images() {
        if image.start > end {
            runs.push(json!(["text", prompt.tokens()[end..image.start]]));
        }
        end = image.end;
        runs.push(json!(["image", image.len()]));
    }
    if end < prompt.tokens().len() {
        runs.push(json!(["text", prompt.tokens()[end..]]));
    }
    runs
}

fn positions(prompt: &EncodedPrompt) -> [Vec<usize>; 3] {
    let all = prompt.positions();
    [0, 1, 2].map(|axis| all.iter().map(|position| position[axis]).collect())
}

fn write(path: &Path, values: &[f32]) -> Result<(), Failure> {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    std::fs::write(path, bytes).map_err(Failure::file(path))
}
