//! `ruvllm bench images`: how long an image takes to the first token, and what of it.

use crate::flags::{ModelArgs, PlacementArgs, ProjectorArgs, SessionArgs, session};
use crate::io::table::{Format, Printer};
use crate::io::{Failure, picture};
use ruvllm::KvType;
use ruvllm::session::Part;
use ruvllm::vision::Image;
use ruvllm_benches::median;
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  ruvllm bench images -m model.gguf --mmproj mmproj.gguf
  ruvllm bench images -m model.gguf --mmproj mmproj.gguf --image cat.png -r 5 -o json

Milliseconds, medians: pixels are resized and normalised, encoded, and read by the text model, whose logits for the first \
token are then there.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Image to encode [default: made-up pixels]
    #[arg(long, value_name = "FILE")]
    image: Option<PathBuf>,
    /// Width and height of made-up pixels
    #[arg(long, value_name = "N", default_value_t = 896, allow_negative_numbers = true, conflicts_with = "image",
          value_parser = clap::value_parser!(u32).range(1..=1 << 14))]
    size: u32,
    /// Repetitions, each of another image: what was encoded is kept
    #[arg(short, long, value_name = "N", default_value_t = 3, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: u32,
    /// How to print
    #[arg(short, long, value_enum, default_value_t = Format::Md)]
    output: Format,
    #[command(flatten)]
    projector: ProjectorArgs,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    session: SessionArgs,
}

/// Seconds of each repetition.
#[derive(Default)]
struct Times {
    pixels: Vec<f64>,
    encoder: Vec<f64>,
    prompt: Vec<f64>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let plain = match &args.image {
        Some(path) => picture::open(path)?,
        None => made_up(args.size)?,
    };
    let model = args.model.open(&args.placement)?;
    let options = args.session.options(None, KvType::F16);
    let mut session = session(&model, &args.session, &options, 1)?;
    let projector = args
        .projector
        .open(&args.model, &args.session, session.model())?;
    let options = args.projector.options();
    session.images().set_projector(&projector, options)?;
    let (mut times, mut n_tokens) = (Times::default(), 0);
    // The first one reads the files and takes memory.
    for i in 0..=args.repetitions {
        let image = changed(&plain, i)?;
        let start = Instant::now();
        projector.pixels(&image, options)?;
        let pixels = start.elapsed().as_secs_f64();
        let start = Instant::now();
        let encoded =
            session
                .engine()
                .encode_image(&projector, &image, options, &session.cancel_token());
        n_tokens = encoded.map_err(ruvllm::Error::from)?.n();
        let encoder = start.elapsed().as_secs_f64() - pixels;
        session.clear();
        let start = Instant::now();
        let parts = [Part::Image(&image)];
        session
            .images()
            .prefill(&parts)
            .map_err(ruvllm::Error::from)?;
        if i > 0 {
            times.pixels.push(pixels);
            times.encoder.push(encoder);
            times.prompt.push(start.elapsed().as_secs_f64());
        }
    }
    let all = [&times.pixels, &times.encoder, &times.prompt];
    let [pixels, encoder, prompt] = all.map(|times| 1e3 * median(times).unwrap_or(f64::NAN));
    let total = pixels + encoder + prompt;
    let ms = |x: f64| format!("{x:.1}");
    let mut printer = Printer::new(args.output);
    let cells = [
        ("projector", projector.kind().to_owned()),
        ("image", format!("{} × {}", plain.width(), plain.height())),
        ("tokens", n_tokens.to_string()),
        ("pixels ms", ms(pixels)),
        ("encoder ms", ms(encoder)),
        ("prompt ms", ms(prompt)),
        ("first token ms", ms(total)),
    ];
    printer.row(&cells, || {
        json!({
            "projector": projector.kind(),
            "width": plain.width(),
            "height": plain.height(),
            "n_tokens": n_tokens,
            "pixels_ms": pixels,
            "encoder_ms": encoder,
            "prompt_ms": prompt,
            "first_token_ms": total,
            "samples_s": { "pixels": times.pixels, "encoder": times.encoder, "prompt": times.prompt },
        })
    })?;
    printer.end()
}

/// Noise.
fn made_up(size: u32) -> Result<Image, Failure> {
    Image::check_size(size, size)?;
    let mut state = size;
    let noise = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    });
    let rgb: Vec<u8> = noise.take(3 * (size * size) as usize).collect();
    Ok(Image::rgb8(size, size, &rgb)?)
}

/// An image of which no other `i` has the same pixels.
fn changed(image: &Image, i: u32) -> Result<Image, Failure> {
    let mut rgb = image.rgb().to_vec();
    for (x, byte) in rgb.iter_mut().zip(i.to_le_bytes()) {
        *x ^= byte;
    }
    Ok(Image::rgb8(image.width(), image.height(), &rgb)?)
}
