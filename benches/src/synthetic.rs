//! Models with the shapes of published ones and random weights, to measure without a download.

use ruvllm::gguf::{Array, Gguf, GgufError, Metadata, Value, Writer};
use ruvllm::quant::{DType, FileType, ModelShape};
use serde_json::Value as Json;
use std::sync::OnceLock;

/// A published model's sizes: its metadata, and names and dimensions of its tensors; of the largest,
/// some of the layers and experts. A line of `shapes.json`, which `benches/shapes.py` adds to.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Name on the command line.
    pub name: String,
    metadata: Vec<(String, Value)>,
    tensors: Vec<Tensor>,
}

/// A tensor that a model has once, or that several layers have.
#[derive(Clone, Debug, PartialEq)]
struct Tensor {
    /// With `*` for the number of a layer.
    name: String,
    /// Row length first.
    dims: Vec<u64>,
    layers: Vec<usize>,
    /// Its type, if it is not up to the file's.
    dtype: Option<DType>,
}

impl Shape {
    /// All shapes.
    pub fn all() -> &'static [Shape] {
        static ALL: OnceLock<Vec<Shape>> = OnceLock::new();
        ALL.get_or_init(|| {
            let lines = include_str!("shapes.json").lines();
            let shape = |line| Shape::of_line(&serde_json::from_str(line).ok()?);
            lines
                .map(|line| shape(line).expect("a line of shapes.json is a shape"))
                .collect()
        })
    }

    /// The shape called `name`.
    pub fn from_name(name: &str) -> Option<Shape> {
        Shape::all().iter().find(|s| s.name == name).cloned()
    }

    /// Names of all shapes, for messages.
    pub fn names() -> String {
        let names: Vec<&str> = Shape::all().iter().map(|shape| &*shape.name).collect();
        names.join(", ")
    }

    fn of_line(line: &Json) -> Option<Shape> {
        let metadata = line["metadata"].as_object()?.iter();
        let tensors = line["tensors"].as_array()?.iter();
        Some(Shape {
            name: line["name"].as_str()?.into(),
            metadata: metadata
                .map(|(key, json)| Some((key.clone(), value(json)?)))
                .collect::<Option<_>>()?,
            tensors: tensors.map(Tensor::of_json).collect::<Option<_>>()?,
        })
    }

    /// The value of keys that end with `.key`, of layers the largest; 0 if there is none.
    fn count(&self, key: &str) -> usize {
        let end = format!(".{key}");
        let named = self
            .metadata
            .iter()
            .filter(|(name, _)| name.ends_with(&end));
        let largest = named.filter_map(|(_, value)| match value {
            Value::U32(n) => Some(*n),
            Value::Array(Array::U32(of_layers)) => of_layers.iter().copied().max(),
            _ => None,
        });
        largest.max().unwrap_or(0) as usize
    }

    fn set_count(&mut self, key: &str, n: usize) {
        let end = format!(".{key}");
        for (name, value) in &mut self.metadata {
            if name.ends_with(&end) && matches!(value, Value::U32(_)) {
                *value = (n as u32).into();
            }
        }
    }

    /// The same shape with fewer layers: the first ones, and as many of the last as share keys and
    /// values with others.
    ///
    /// # Panics
    ///
    /// If it has not so many layers.
    #[must_use]
    pub fn with_layers(mut self, n_layer: usize) -> Shape {
        let all = self.count("block_count");
        assert!(n_layer <= all, "{} has {all} layers", self.name);
        let n_shared = self.count("attention.shared_kv_layers") * n_layer / all.max(1);
        let kept: Vec<usize> = (0..n_layer - n_shared).chain(all - n_shared..all).collect();
        fn of_kept<T: Copy>(of_layers: &mut Vec<T>, kept: &[usize]) {
            *of_layers = kept.iter().map(|&i| of_layers[i]).collect();
        }
        for (_, value) in &mut self.metadata {
            match value {
                Value::Array(Array::U32(of)) if of.len() == all => of_kept(of, &kept),
                Value::Array(Array::F32(of)) if of.len() == all => of_kept(of, &kept),
                Value::Array(Array::Bool(of)) if of.len() == all => of_kept(of, &kept),
                _ => {}
            }
        }
        for tensor in self.tensors.iter_mut().filter(|t| t.is_of_layers()) {
            let layers = kept.iter().enumerate();
            tensor.layers = layers
                .filter(|(_, i)| tensor.layers.contains(i))
                .map(|(new, _)| new)
                .collect();
        }
        // Values for a token that each layer has are a tensor of the model.
        let n_values = self.count("embedding_length_per_layer_input");
        let of_model = self
            .tensors
            .iter_mut()
            .filter(|t| t.name.starts_with("per_layer_"));
        for n in of_model.flat_map(|tensor| &mut tensor.dims) {
            if *n == (n_values * all) as u64 {
                *n = (n_values * n_layer) as u64;
            }
        }
        self.set_count("block_count", n_layer);
        self.set_count("attention.shared_kv_layers", n_shared);
        self
    }

    /// Some narrow layers with few experts and tokens: opened in no time.
    #[must_use]
    pub fn reduced(self) -> Shape {
        const N_EXPERT: usize = 16;
        const N_VOCAB: usize = 64;
        const N_FF: usize = 256;
        const WIDTHS: [&str; 3] = [
            "feed_forward_length",
            "expert_feed_forward_length",
            "expert_shared_feed_forward_length",
        ];
        const OF_EXPERTS: [&str; 3] = ["_exps.", ".ffn_gate_inp.", ".exp_probs_b."];
        // Of layers that share keys and values there are two kinds.
        let shares = self.count("attention.shared_kv_layers") > 0;
        let n_layer = self.count("block_count").min(if shares { 12 } else { 4 });
        let (n_expert, n_vocab) = (self.count("expert_count"), self.n_vocab());
        let mut shape = self.with_layers(n_layer);
        let n_embd = shape.count("embedding_length");
        let wide = |n: &usize| *n > N_FF && *n != n_embd;
        let widths = WIDTHS.map(|key| Some(shape.count(key)).filter(wide));
        for (key, _) in WIDTHS.iter().zip(widths).filter(|(_, n)| n.is_some()) {
            shape.set_count(key, N_FF);
        }
        for Tensor { name, dims, .. } in &mut shape.tensors {
            let is_of_experts = OF_EXPERTS.iter().any(|part| name.contains(part));
            let (is_ffn, n_dims) = (name.contains(".ffn_"), dims.len());
            for (i, n) in dims.iter_mut().enumerate() {
                let now = *n as usize;
                // Gate and up of a layer may be one matrix.
                let times = |width: usize| [1, 2].into_iter().find(|times| now == times * width);
                if is_of_experts && i + 1 == n_dims {
                    *n = now.min(N_EXPERT) as u64;
                } else if now == n_vocab {
                    *n = N_VOCAB as u64;
                } else if let Some(times) = widths.into_iter().flatten().find_map(times)
                    && is_ffn
                    && now != n_embd
                {
                    *n = (times * N_FF) as u64;
                }
            }
        }
        shape.set_count("vocab_size", N_VOCAB);
        shape.set_count("expert_count", n_expert.min(N_EXPERT));
        shape
    }

    /// Number of tokens.
    fn n_vocab(&self) -> usize {
        let embeddings = self.tensors.iter().find(|t| t.name == EMBEDDING);
        embeddings.map_or(0, |t| t.dims[1] as usize)
    }
}

/// The token embeddings.
const EMBEDDING: &str = "token_embd.weight";

impl Tensor {
    /// A name, dimensions, layers, and perhaps a type.
    fn of_json(json: &Json) -> Option<Tensor> {
        let numbers = |json: &Json| -> Option<Vec<u64>> {
            json.as_array()?.iter().map(Json::as_u64).collect()
        };
        let dtype = match json[3].as_str() {
            Some(name) => Some(*DType::ALL.iter().find(|t| t.to_string() == name)?),
            None => None,
        };
        Some(Tensor {
            name: json[0].as_str()?.into(),
            dims: numbers(&json[1])?,
            layers: numbers(&json[2])?.iter().map(|&i| i as usize).collect(),
            dtype,
        })
    }

    fn is_of_layers(&self) -> bool {
        self.name.contains('*')
    }

    /// What its values are, if they are not noise: vectors, and norms of heads.
    fn constant(&self) -> Option<f32> {
        const ONES: [&str; 8] = [
            "norm",
            ".ln1.",
            ".ln2.",
            "post_ln",
            "scale",
            "rope_freqs",
            "time_mix_",
            "ssm_d",
        ];
        match &*self.name {
            name if name.ends_with(".bias") => Some(0.0),
            name if name.ends_with(".ssm_a") => Some(-1.0),
            name if name.contains("norm") => Some(1.0),
            _ if self.dims.len() > 1 => None,
            name if ONES.iter().any(|part| name.contains(part)) => Some(1.0),
            _ => Some(0.0),
        }
    }
}

/// A value of metadata.
fn value(json: &Json) -> Option<Value> {
    let number = |json: &Json| json.as_u64().and_then(|n| u32::try_from(n).ok());
    let real = |json: &Json| json.as_f64().map(|x| x as f32);
    Some(match json {
        Json::Bool(x) => (*x).into(),
        Json::String(x) => x.as_str().into(),
        Json::Number(_) => match number(json) {
            Some(n) => n.into(),
            None => real(json)?.into(),
        },
        Json::Array(all) => Value::Array(match all.first()? {
            Json::Bool(_) => Array::Bool(all.iter().map(Json::as_bool).collect::<Option<_>>()?),
            first if first.is_f64() => Array::F32(all.iter().map(real).collect::<Option<_>>()?),
            _ => match all.iter().map(number).collect() {
                Some(all) => Array::U32(all),
                None => Array::U64(all.iter().map(Json::as_u64).collect::<Option<_>>()?),
            },
        }),
        _ => return None,
    })
}

/// Number of rows that are actually quantised; a matrix repeats them, to save time.
const ROWS: usize = 16;
/// The same of embeddings, so that so many tokens of a prompt differ.
const EMBEDDINGS: usize = 1024;

/// A model of this shape and file type, in memory, always the same.
///
/// # Errors
/// If the model exceeds the limits of a GGUF file, which no listed shape does.
pub fn synthetic(shape: &Shape, file_type: FileType) -> Result<Gguf, GgufError> {
    Gguf::from_bytes(synthetic_file(shape, file_type).to_bytes()?)
}

/// The same as a file to be written, which other engines open, too.
pub fn synthetic_file(shape: &Shape, file_type: FileType) -> Writer<'static> {
    let mut file = Writer::new();
    file.metadata("tokenizer.ggml.model", "none");
    build(shape, file_type, &mut file);
    file
}

/// [`synthetic`] with the tokenizer in `metadata`, whose vocabulary is not larger than the shape's.
///
/// # Errors
/// As [`synthetic`].
pub fn synthetic_with_tokens(
    shape: &Shape,
    file_type: FileType,
    metadata: &Metadata,
) -> Result<Gguf, GgufError> {
    let mut file = Writer::new();
    for (key, value) in metadata
        .iter()
        .filter(|(key, _)| key.starts_with("tokenizer."))
    {
        file.metadata(key, value.clone());
    }
    build(shape, file_type, &mut file);
    Gguf::from_bytes(file.to_bytes()?)
}

fn build(shape: &Shape, file_type: FileType, file: &mut Writer<'_>) {
    file.metadata("general.name", &*shape.name);
    file.metadata("general.file_type", file_type as u32);
    for (key, value) in &shape.metadata {
        file.metadata(key, value.clone());
    }
    let n_expert = shape.count("expert_count");
    let sizes = ModelShape {
        n_layer: shape.count("block_count"),
        n_head: shape.count("attention.head_count"),
        n_head_kv: shape.count("attention.head_count_kv"),
        n_expert,
        tied_embeddings: !shape.tensors.iter().any(|t| t.name == "output.weight"),
        importance: false,
    };
    let n_layer = sizes.n_layer;
    for i in 0..=n_layer {
        // Tensors of the model come before those of its layers.
        let here = shape.tensors.iter().filter(|t| match i {
            0 => !t.is_of_layers(),
            _ => t.is_of_layers() && t.layers.contains(&(i - 1)),
        });
        for tensor in here {
            let name = tensor.name.replace('*', &i.wrapping_sub(1).to_string());
            add(tensor, name, file_type, &sizes, file);
        }
    }
}

/// Adds a tensor called `name` to the file.
fn add(
    tensor: &Tensor,
    name: String,
    file_type: FileType,
    sizes: &ModelShape,
    file: &mut Writer<'_>,
) {
    let dims = &tensor.dims;
    let (n_in, n_rows) = (dims[0] as usize, dims[1..].iter().product::<u64>() as usize);
    let constant = tensor.constant();
    let dtype = match (tensor.dtype, constant) {
        (Some(dtype), _) => dtype,
        (None, Some(_)) => DType::F32,
        (None, None) => file_type
            .tensor_type(&name, dims, sizes)
            .unwrap_or(DType::F32),
    };
    // Routers whose rows repeat would choose equal experts, and the same ones for tokens whose rows
    // do.
    let n_own = match &*name {
        EMBEDDING | "per_layer_token_embd.weight" => EMBEDDINGS,
        name if name.ends_with("ffn_gate_inp.weight") => n_rows,
        _ => ROWS,
    }
    .min(n_rows);
    let rows = match constant {
        _ if dtype == DType::I32 => experts(n_in, n_own, sizes.n_expert),
        // Tokens of a drafter are the model's.
        _ if dtype == DType::I64 => vec![0; 8 * n_in * n_own],
        None => quantised_rows(dtype, n_in, n_own),
        Some(x) => std::iter::repeat_n(x.to_le_bytes(), n_in * n_own)
            .flatten()
            .collect(),
    };
    let row = rows.len() / n_own;
    file.tensor_with(name, dims, dtype, move |out| {
        for first in (0..n_rows).step_by(n_own) {
            out.write_all(&rows[..row * n_own.min(n_rows - first)])?;
        }
        Ok(())
    });
}

/// Rows of `n` experts each, of `n_expert`.
fn experts(n: usize, n_rows: usize, n_expert: usize) -> Vec<u8> {
    let all = (0..n * n_rows).map(|i| ((i % n + i / n) % n_expert) as i32);
    all.flat_map(i32::to_le_bytes).collect()
}

/// Rows of noise, scaled to preserve the magnitude of activations.
fn quantised_rows(dtype: DType, n_in: usize, n_rows: usize) -> Vec<u8> {
    let format = dtype.float_format();
    let mut state = n_in as u32;
    let scale = 1.0 / (n_in as f32).sqrt();
    let values: Vec<f32> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * 1.7 * scale
    })
    .take(n_rows * n_in)
    .collect();
    let mut bytes = vec![0; values.len() / format.block_elems * format.block_bytes];
    match format.quantize {
        Some(quantize) => quantize(&values, None, &mut bytes),
        // Nothing is quantised to MXFP4: an exponent whose largest value is about that of the
        // noise, and any codes.
        None if dtype == DType::MXFP4 => {
            let exponent = (127.0 + (1.7 * scale / 6.0).log2()) as u8;
            for (block, values) in bytes
                .chunks_exact_mut(format.block_bytes)
                .zip(values.chunks_exact(format.block_elems))
            {
                block[0] = exponent;
                block[1..]
                    .iter_mut()
                    .zip(values)
                    .for_each(|(codes, x)| *codes = x.to_bits() as u8);
            }
        }
        None => bytes.copy_from_slice(bytemuck::cast_slice(&values)),
    }
    bytes
}
