//! Tiny models of every architecture, and changes that a broken or hostile file could have.
#![allow(dead_code)] // each test program uses its part

use crate::run::open;
use crate::tiny::Parts;
use ruvllm::decode::{Drafter, MtpDrafter};
use ruvllm::engine::{CancelToken, Outputs, SessionOptions};
use ruvllm::gguf::{Array, Gguf, StringArray, Value};
use ruvllm::quant::DType;
use ruvllm::session::Session;
use serde_json::Value as Json;
use std::collections::BTreeSet;
use std::sync::OnceLock;

/// A model's metadata, and the shapes of its tensors.
pub(crate) struct Shapes {
    pub(crate) name: String,
    pub(crate) arch: String,
    metadata: Vec<(String, Value)>,
    tensors: Vec<(String, Vec<usize>)>,
}

impl Shapes {
    /// The file, with seeded weights.
    pub(crate) fn parts(&self) -> Parts {
        let mut parts = Parts::new();
        self.metadata
            .iter()
            .for_each(|(key, value)| parts.set(key, value.clone()));
        self.tensors
            .iter()
            .for_each(|(name, dims)| match name.contains("tid2eid") {
                true => parts.numbers(name, dims, 3),
                false => parts.hashed(name, dims),
            });
        parts
    }

    /// A model as `tests/reference_llama_cpp.py` writes it.
    fn of_family(name: &str, family: &Json) -> Shapes {
        let arch = family["architecture"].as_str().unwrap();
        let tensors = family["tensors"].as_object().unwrap();
        Shapes {
            name: name.to_owned(),
            arch: arch.to_owned(),
            metadata: std::iter::once(("general.architecture".to_owned(), arch.into()))
                .chain(metadata(family))
                .collect(),
            tensors: tensors
                .iter()
                .map(|(name, dims)| (name.clone(), sizes(dims)))
                .collect(),
        }
    }

    /// A model as `tests/reference_shapes.py` writes it.
    pub(crate) fn of_line(line: &Json) -> Shapes {
        let of_layers = |entry: &Json| -> Vec<(String, Vec<usize>)> {
            let name = entry[0].as_str().unwrap();
            sizes(&entry[2])
                .iter()
                .map(|i| (name.replace('*', &i.to_string()), sizes(&entry[1])))
                .collect()
        };
        Shapes {
            name: line["name"].as_str().unwrap().to_owned(),
            arch: line["metadata"]["general.architecture"]
                .as_str()
                .unwrap()
                .to_owned(),
            metadata: metadata(line).collect(),
            tensors: line["tensors"]
                .as_array()
                .unwrap()
                .iter()
                .flat_map(of_layers)
                .collect(),
        }
    }
}

fn metadata(model: &Json) -> impl Iterator<Item = (String, Value)> {
    model["metadata"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(key, json)| (key.clone(), value(json)))
}

fn sizes(json: &Json) -> Vec<usize> {
    json.as_array()
        .unwrap()
        .iter()
        .map(|n| n.as_u64().unwrap() as usize)
        .collect()
}

fn value(json: &Json) -> Value {
    match json {
        Json::Bool(x) => (*x).into(),
        Json::String(x) => x.as_str().into(),
        Json::Number(x) if x.is_u64() => (x.as_u64().unwrap() as u32).into(),
        Json::Number(x) => (x.as_f64().unwrap() as f32).into(),
        Json::Array(all) => Value::Array(match &all[0] {
            Json::Bool(_) => Array::Bool(all.iter().map(|x| x.as_bool().unwrap()).collect()),
            Json::String(_) => Array::Strings(StringArray::from_iter(
                all.iter().map(|x| x.as_str().unwrap()),
            )),
            first if first.is_f64() => {
                Array::F32(all.iter().map(|x| x.as_f64().unwrap() as f32).collect())
            }
            _ => Array::U32(all.iter().map(|x| x.as_u64().unwrap() as u32).collect()),
        }),
        other => panic!("{other}"),
    }
}

/// Models of `tests/data/families.json`.
pub(crate) fn families() -> Json {
    serde_json::from_str(include_str!("../../data/families.json")).unwrap()
}

pub(crate) fn family(reference: &Json, name: &str) -> Parts {
    Shapes::of_family(name, &reference[name]).parts()
}

/// Models of every architecture; those with the same one differ in what their layers have.
pub(crate) fn models() -> &'static [Shapes] {
    static MODELS: OnceLock<Vec<Shapes>> = OnceLock::new();
    MODELS.get_or_init(|| {
        let lines = include_str!("../../data/shapes.json").lines();
        let lines = lines.map(|line| Shapes::of_line(&serde_json::from_str(line).unwrap()));
        let families = families();
        let families = families
            .as_object()
            .unwrap()
            .iter()
            .filter(|(name, _)| *name != "about");
        lines
            .chain(families.map(|(name, family)| Shapes::of_family(name, family)))
            .collect()
    })
}

/// Encoders, and a model that has one before it (`tests/reference_encoders.py`).
pub(crate) fn encoders() -> &'static [Shapes] {
    static MODELS: OnceLock<Vec<Shapes>> = OnceLock::new();
    MODELS.get_or_init(|| {
        let files = [
            include_str!("../../data/encoders.json"),
            include_str!("../../data/encoder_decoder.json"),
        ];
        let of_file = |file: &&str| -> Vec<Shapes> {
            let all: Json = serde_json::from_str(file).unwrap();
            let models = all.as_object().unwrap().iter();
            let models = models.filter(|(name, _)| *name != "about");
            models
                .map(|(name, family)| Shapes::of_family(name, family))
                .collect()
        };
        files.iter().flat_map(of_file).collect()
    })
}

/// All keys behind the name of an architecture.
fn keys() -> &'static [String] {
    static KEYS: OnceLock<Vec<String>> = OnceLock::new();
    KEYS.get_or_init(|| {
        let keys = models().iter().flat_map(|m| {
            m.metadata
                .iter()
                .map(|(key, _)| key.split_once('.').unwrap().1)
        });
        keys.map(str::to_owned)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect()
    })
}

/// All names of tensors.
fn names() -> &'static [String] {
    static NAMES: OnceLock<Vec<String>> = OnceLock::new();
    NAMES.get_or_init(|| {
        let names = models()
            .iter()
            .flat_map(|m| m.tensors.iter().map(|(name, _)| name.clone()));
        names.collect::<BTreeSet<_>>().into_iter().collect()
    })
}

const TEXTS: [&str; 10] = [
    "none", "linear", "yarn", "longrope", "llama3", "mean", "rank", "", "\u{fffd}", "llama",
];
const TYPES: [DType; 8] = [
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::MXFP4,
    DType::Q4_K,
    DType::F64,
    DType::I32,
];

/// The file of `model` with changes of six bytes each: what, where, and a number.
pub(crate) fn mutant(model: &Shapes, changes: &[[u8; 6]]) -> Vec<u8> {
    let mut parts = model.parts();
    let mut flips = Vec::new();
    for &[what, place, number @ ..] in changes {
        let number = u32::from_le_bytes(number);
        let small = number as usize % 300;
        let own = parts.keys();
        // One of its own keys, or of any architecture's.
        let key = match what & 0x80 == 0 && !own.is_empty() {
            true => own[usize::from(place) % own.len()].clone(),
            false => format!(
                "{}.{}",
                model.arch,
                keys()[usize::from(place) % keys().len()]
            ),
        };
        let tensors = parts.tensor_names();
        let tensor = tensors
            .get(usize::from(place) % tensors.len().max(1))
            .cloned()
            .unwrap_or_default();
        match what % 16 {
            0 => parts.set(&key, number),
            // Numbers of the order that files have.
            1 | 2 => parts.set(&key, small as u32),
            3 => parts.set(&key, f32::from_bits(number)),
            4 => parts.set(&key, small as f32 / 16.0),
            5 => parts.set(&key, TEXTS[number as usize % TEXTS.len()]),
            6 => parts.set(&key, number % 2 == 0),
            7 => parts.set(&key, array(number)),
            8 => parts.remove(&key),
            9 => parts.remove_tensor(&tensor),
            10 => parts.resize(&tensor, number as usize >> 16, small),
            11 => parts.retype(&tensor, TYPES[number as usize % TYPES.len()]),
            12 => parts.fill(&tensor, f32::from_bits(number)),
            13 => {
                let name = &names()[number as usize % names().len()];
                if parts.has_tensor(&tensor) && !parts.has_tensor(name) {
                    parts.copy_tensor(&tensor, name);
                }
            }
            14 => parts.retype_all(TYPES[number as usize % 4]),
            _ => flips.push((number as usize, place)),
        }
    }
    let mut file = parts.bytes();
    let n = file.len();
    for (place, flip) in flips {
        file[place % n] ^= flip;
    }
    file
}

/// A list per layer, of a length and with values that a number tells.
fn array(number: u32) -> Value {
    let n = number as usize % 9;
    let bits = number >> 8;
    Value::Array(match number >> 4 & 3 {
        0 => Array::Bool((0..n).map(|i| bits >> i & 1 == 1).collect()),
        1 => Array::F32(
            (0..n)
                .map(|i| f32::from_bits(bits.rotate_left(3 * i as u32)))
                .collect(),
        ),
        2 => Array::I32(
            (0..n)
                .map(|i| bits.rotate_left(5 * i as u32) as i32)
                .collect(),
        ),
        _ => Array::U32((0..n).map(|i| bits >> (3 * i) & 7).collect()),
    })
}

/// Opens a file and computes a prompt and tokens with it, goes back and on, or computes a vector.
/// Whatever is refused is refused in words.
pub(crate) fn compute(file: Vec<u8>) -> Result<(), String> {
    let words = |error: &dyn std::error::Error| {
        let text = error.to_string();
        assert!(!text.is_empty());
        text
    };
    let gguf = Gguf::from_bytes(file).map_err(|e| words(&e))?;
    let model = open(gguf).map_err(|e| words(&e))?;
    let n_vocab = model.hparams().n_vocab as u32;
    // Enough rows for panels.
    let tokens: Vec<u32> = (0..40).map(|i| i * 7 % n_vocab).collect();
    if model.hparams().attention().any(|attn| !attn.causal) {
        let embedder = model.embedder().map_err(|e| words(&e))?;
        return embedder
            .embed_tokens(&[&tokens[..9], &tokens[..1]])
            .map(drop)
            .map_err(|e| words(&e));
    }
    let options = SessionOptions {
        n_ctx: Some(48),
        ..SessionOptions::default()
    };
    let mut session = model.session_with(&options).map_err(|e| words(&e))?;
    if let Ok(mut block) = MtpDrafter::new(session.engine(), &options) {
        let (mut outputs, mut draft) = (Outputs::default(), Vec::new());
        let states = vec![0.5; (tokens.len() - 1) * model.hparams().n_embd];
        block.push(&tokens);
        while let Some(slot) = block.next_pass(3, &states) {
            let is_ok = session
                .engine()
                .step(&mut [slot], &mut outputs, &CancelToken::default())
                .is_ok();
            block.end_pass(is_ok.then(|| (outputs.logits(0), outputs.states(0))));
        }
        block.draft(3, &mut draft);
        assert!(draft.len() <= 3);
    }
    if model.hparams().encoder.is_some() {
        session.encode(&tokens[..9]).map_err(|e| words(&e))?;
    }
    pass(&mut session, &tokens).map_err(|e| words(&e))
}

fn pass(session: &mut Session, tokens: &[u32]) -> Result<(), ruvllm::SessionError> {
    session.prefill(tokens)?;
    session.decode(tokens[1])?;
    session.rewind(tokens.len() - 3)?;
    session.decode(tokens[2])?;
    let mut other = session.fork()?;
    other.prefill(&tokens[..2])
}
