//! Images in saved sessions: the embeddings of each, once, and the spans that they stand in, with the
//! hash by which the prefix cache knows them. So a session that is loaded needs no encoder.

use crate::gguf::Gguf;
use crate::kv::ImageKey;
use crate::layers::spans::{Sight, Span, Spans};
use crate::quant::DType;
use crate::session::StateError;
use std::sync::Arc;

/// Tensor of the spans: [`WORDS`] numbers for each.
pub(super) const SPANS: &str = "spans";
/// First position, number of positions, first row, index of the image, layers of deepstack, rows and
/// columns (0 without M-RoPE), what its tokens see of each other, and the hash in four numbers.
const WORDS: usize = 12;
/// Beginning of the names of tensors with embeddings.
const IMAGE: &str = "image.";

const SIGHTS: [Sight; 3] = [Sight::Causal, Sight::Both, Sight::BothInWindows];

/// Whether a tensor has embeddings.
pub(super) fn is_image(name: &str) -> bool {
    name.starts_with(IMAGE)
}

pub(super) fn name(i: usize) -> String {
    format!("{IMAGE}{i}")
}

/// The embeddings of different images, and the numbers of [`SPANS`].
pub(super) fn to_save(spans: &Spans) -> (Vec<&Arc<[f32]>>, Vec<u32>) {
    let (mut images, mut words): (Vec<&Arc<[f32]>>, Vec<u32>) = (Vec::new(), Vec::new());
    for span in spans.iter() {
        let known = images.iter().position(|of| Arc::ptr_eq(of, &span.rows));
        let image = known.unwrap_or_else(|| {
            images.push(&span.rows);
            images.len() - 1
        });
        let (rows, columns) = span.cells.unwrap_or_default();
        let sight = SIGHTS.iter().position(|of| *of == span.sight).unwrap_or(0);
        let numbers = [
            span.start,
            span.n,
            span.first,
            image,
            span.n_deep,
            rows,
            columns,
            sight,
        ];
        words.extend(numbers.map(|n| n as u32));
        let halves = |word: u64| [word as u32, (word >> 32) as u32];
        words.extend(span.key.0.map(halves).as_flattened());
    }
    (images, words)
}

/// The spans of a file, in a text of `n_tokens` of a model of `n_embd` and `n_layer`.
pub(super) fn read(
    gguf: &Gguf,
    words: &[u32],
    n_tokens: usize,
    (n_embd, n_layer): (usize, usize),
) -> Result<Spans, StateError> {
    let damaged = |what| StateError::Damaged { item: SPANS, what };
    let (spans, rest) = words.as_chunks::<WORDS>();
    if !rest.is_empty() {
        return Err(damaged("they end inside one"));
    }
    let mut images: Vec<Arc<[f32]>> = Vec::new();
    let mut read: Vec<Span> = Vec::new();
    for words in spans {
        let [start, n, first, image, n_deep, rows, columns, sight] =
            std::array::from_fn(|i| words[i] as usize);
        if image == images.len() {
            let tensor = gguf
                .tensor(&name(image))
                .filter(|tensor| tensor.dtype == DType::F32 && tensor.dims.len() == 1)
                .ok_or(damaged("an image is missing"))?;
            images.push(bytemuck::pod_collect_to_vec(gguf.data(tensor)).into());
        }
        let image = images
            .get(image)
            .ok_or(damaged("images are not in order"))?;
        let end = read.last().map_or(0, |last| last.start + last.n);
        // Each of these is below 2³², so sums do not overflow.
        let (width, n_rows) = (n_embd * (1 + n_deep.min(n_layer)), first + n);
        if n == 0 || start < end || start + n > n_tokens || n_deep > n_layer {
            return Err(damaged("one lies outside of the text, or in another"));
        }
        if !image.len().is_multiple_of(width) || n_rows > image.len() / width {
            return Err(damaged("an image has too few embeddings"));
        }
        let cells = match (rows, columns) {
            (0, 0) => None,
            (rows, columns) if rows.checked_mul(columns) == Some(n) => Some((rows, columns)),
            _ => return Err(damaged("an image has another shape")),
        };
        let word = |i: usize| u64::from(words[i]) | u64::from(words[i + 1]) << 32;
        read.push(Span {
            start,
            n,
            first,
            rows: Arc::clone(image),
            key: ImageKey([word(8), word(10)]),
            width: n_embd,
            n_deep,
            cells,
            sight: *SIGHTS.get(sight).ok_or(damaged("of no known kind"))?,
        });
    }
    if gguf
        .tensors()
        .iter()
        .filter(|tensor| is_image(&tensor.name))
        .count()
        != images.len()
    {
        return Err(damaged("images that stand nowhere"));
    }
    Ok(read.into_iter().collect())
}
