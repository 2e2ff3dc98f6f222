//! Models that are quantised while they are opened.

use crate::common::{conformance, subdirectories};
use ruvllm::Model;
use ruvllm::gguf::{Gguf, TensorInfo, Writer};
use ruvllm::model::quantize::{
    Importance, NamedType, Planned, Recipe, RecipeError, Sums, model_shape, writer,
};
use ruvllm::model::{ModelError, OpenOptions, OpenStage};
use ruvllm::quant::{Converter, DType, FileType, Moments};
use std::path::PathBuf;

/// The shipped model in another type: that of a mix, or of all matrices.
fn demo(from: &Gguf, file_type: FileType) -> Gguf {
    let shape = model_shape(from);
    let tensors = from.tensors().iter();
    let plan: Vec<Planned<'_>> = tensors
        .map(|tensor| Planned {
            tensor,
            to: file_type
                .tensor_type(&tensor.name, &tensor.dims, &shape)
                .unwrap_or(tensor.dtype),
            importance: None,
        })
        .collect();
    let converter = Converter::new(None, |_| true).unwrap();
    Gguf::from_writer(writer(from, &plan, file_type, &converter, None)).unwrap()
}

fn shipped() -> Gguf {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/models/ruvllm-rust-6m-q8_0.gguf"
    );
    Gguf::open(path).unwrap()
}

/// Names, types and bytes of all tensors.
fn contents(gguf: &Gguf) -> Vec<(String, DType, Vec<u8>)> {
    let tensors = gguf.tensors().iter();
    tensors
        .map(|t| (t.name.clone(), t.dtype, gguf.data(t).to_vec()))
        .collect()
}

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// As the file that is quantised first; the cache has it once, and notices damage.
#[test]
fn is_what_quantising_first_gives() {
    let f16 = demo(&shipped(), FileType::F16);
    let expected = demo(&f16, FileType::Q8_0);
    let mut stages = Vec::new();
    let model = OpenOptions::new()
        .quantize(FileType::Q8_0)
        .progress(|stage, _| {
            stages.push(stage);
            true
        })
        .open_gguf(f16.clone())
        .unwrap();
    assert!(stages.contains(&OpenStage::Quantize));
    assert_eq!(contents(model.gguf()), contents(&expected));
    assert!(
        !model.gguf().worth_copying(),
        "it is in huge pages as it is"
    );
    let plain = Model::from_gguf(expected.clone()).unwrap();
    let logits = |model: &Model| {
        let mut session = model.session().unwrap();
        session.prefill(&[1, 2, 3]).unwrap();
        session.logits().to_vec()
    };
    assert_eq!(logits(&model), logits(&plain));

    let name = format!("ruvllm-quantize-open-{}", std::process::id());
    let folder = Folder(std::env::temp_dir().join(name));
    let open = |gguf: &Gguf| {
        let options = OpenOptions::new()
            .quantize(FileType::Q8_0)
            .quantize_cache(&folder.0);
        options.open_gguf(gguf.clone()).unwrap()
    };
    let files = || {
        std::fs::read_dir(&folder.0)
            .unwrap()
            .map(|entry| entry.unwrap().path())
    };
    for _ in 0..2 {
        assert_eq!(contents(open(&f16).gguf()), contents(&expected));
        assert_eq!(files().count(), 1);
    }
    std::fs::write(files().next().unwrap(), b"GGUF\x03").unwrap();
    assert_eq!(contents(open(&f16).gguf()), contents(&expected));
    // A single other weight is another model.
    let mut writer = Writer::new();
    for (key, value) in f16.metadata().iter() {
        writer.metadata(key, value.clone());
    }
    for (i, t) in f16.tensors().iter().enumerate() {
        let mut data = f16.data(t).to_vec();
        if i == 7 {
            let middle = data.len() / 2;
            data[middle] ^= 1;
        }
        writer.tensor(&t.name, &t.dims, t.dtype, data);
    }
    open(&Gguf::from_writer(writer).unwrap());
    assert_eq!(files().count(), 2);
}

/// A mix touches no tensor that its family reads as it is.
#[test]
fn reference_models_open_in_small_types() {
    let Some(root) = conformance() else { return };
    let mut n_models = 0;
    for set in ["models", "models2", "models3"] {
        for folder in subdirectories(&root.join(set)) {
            let path = folder.join("model-f16.gguf");
            if !path.exists() {
                continue;
            }
            n_models += 1;
            for file_type in [FileType::Q4_0, FileType::IQ4_NL] {
                let options = OpenOptions::new().quantize(file_type);
                if let Err(error) = options.open(&path) {
                    panic!("{} in {file_type}: {error}", path.display());
                }
            }
        }
    }
    assert!(n_models > 100, "only {n_models} models found");
}

/// Moments of another matrix are an error that names the tensor.
#[test]
fn moments_of_other_columns_are_refused() {
    let f16 = demo(&shipped(), FileType::F16);
    let plan = Recipe::from(FileType::Q4_0).plan(&f16).unwrap();
    let converter = Converter::new(None, |_| true).unwrap();
    let moments = |_: &TensorInfo| Ok(vec![Moments::new(7)]);
    let file = writer(&f16, &plan, FileType::Q4_0, &converter, Some(&moments));
    let error = Gguf::from_writer(file).unwrap_err().to_string();
    assert!(
        error.contains("moments of 7 columns for rows of"),
        "{error}"
    );
}

/// What a recipe says of tensors counts, in the result and in the name that the cache gives it.
#[test]
fn recipes() {
    let f16 = demo(&shipped(), FileType::F16);
    let importance = |columns: usize| {
        let sums = Sums {
            squares: (0..columns).map(|i| (i % 5) as f32 + 0.1).collect(),
            counts: vec![1.0],
        };
        let mut importance = Importance::default();
        importance.of.insert("blk.1.attn_q.weight".into(), sums);
        importance
    };
    let columns = f16.tensor("blk.1.attn_q.weight").unwrap().dims[0] as usize;
    let plain = Recipe::from(FileType::Q4_0);
    let mut named = plain.clone();
    let is_down = |name: &str| name.ends_with("ffn_down.weight");
    named.named = vec![NamedType::new("ffn_down", is_down, DType::Q8_0)];
    let mut guided = named.clone();
    guided.importance = Some(importance(columns));

    let name = format!("ruvllm-recipes-{}", std::process::id());
    let folder = Folder(std::env::temp_dir().join(name));
    let open = |recipe: &Recipe| {
        OpenOptions::new()
            .quantize(recipe.clone())
            .open_gguf(f16.clone())
    };
    let mut all = Vec::new();
    for recipe in [&plain, &named, &guided] {
        let converter = Converter::new(None, |_| true).unwrap();
        let plan = recipe.plan(&f16).unwrap();
        let file = writer(&f16, &plan, recipe.file_type, &converter, None);
        let expected = contents(&Gguf::from_writer(file).unwrap());
        assert_eq!(contents(open(recipe).unwrap().gguf()), expected);
        let cached = OpenOptions::new()
            .quantize(recipe.clone())
            .quantize_cache(&folder.0);
        assert_eq!(
            contents(cached.open_gguf(f16.clone()).unwrap().gguf()),
            expected
        );
        assert!(!all.contains(&expected));
        all.push(expected);
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), all.len());
    }
    let differing = |a: &[(String, DType, Vec<u8>)], b: &[(String, DType, Vec<u8>)]| {
        let pairs = a.iter().zip(b).filter(|(a, b)| a != b);
        pairs.map(|(a, _)| a.0.clone()).collect::<Vec<_>>()
    };
    assert!(differing(&all[0], &all[1]).iter().all(|name| is_down(name)));
    assert_eq!(differing(&all[1], &all[2]), ["blk.1.attn_q.weight"]);

    let mut nothing = plain.clone();
    nothing.named = vec![NamedType::new(
        "ffn_dawn",
        |name| name.contains("ffn_dawn"),
        DType::Q8_0,
    )];
    let told = open(&nothing).unwrap_err().to_string();
    assert!(
        told.contains("ffn_dawn") && told.contains("ffn_down"),
        "{told}"
    );
    let mut other = plain;
    other.importance = Some(importance(3));
    let told = open(&other).unwrap_err().to_string();
    assert!(
        told.contains("blk.1.attn_q.weight") && told.contains("another model"),
        "{told}"
    );
    other.importance = Some(Importance::default());
    let told = open(&other).unwrap_err().to_string();
    assert!(told.contains("none of the tensors"), "{told}");
}

#[test]
fn refusals() {
    let f16 = demo(&shipped(), FileType::F16);
    let options = || OpenOptions::new().quantize(FileType::Q4_0);
    let again = options().open_gguf(shipped()).unwrap_err();
    assert!(
        matches!(
            again,
            ModelError::Recipe(RecipeError::QuantizedAlready { .. })
        ),
        "{again}"
    );
    let limited = options()
        .memory_limit(1 << 20)
        .open_gguf(f16.clone())
        .unwrap_err();
    assert!(
        matches!(
            limited,
            ModelError::MemoryLimit {
                limit: 1_048_576,
                ..
            }
        ),
        "{limited}"
    );
    let cancelled = options()
        .progress(|stage, share| stage != OpenStage::Quantize || share < 0.1)
        .open_gguf(f16.clone());
    assert!(matches!(cancelled.unwrap_err(), ModelError::Cancelled));
    // What has the type already needs nothing.
    let same = OpenOptions::new()
        .quantize(FileType::F16)
        .open_gguf(f16.clone())
        .unwrap();
    assert_eq!(
        same.gguf().data(&f16.tensors()[0]).as_ptr(),
        f16.data(&f16.tensors()[0]).as_ptr()
    );
    // A weight that is not a number, with its tensor.
    let mut writer = Writer::new();
    for (key, value) in f16.metadata().iter() {
        writer.metadata(key, value.clone());
    }
    for t in f16.tensors() {
        let mut data = f16.data(t).to_vec();
        if t.name == "blk.1.ffn_up.weight" {
            data[100..102].copy_from_slice(&0x7e00u16.to_le_bytes());
        }
        writer.tensor(&t.name, &t.dims, t.dtype, data);
    }
    let damaged = options()
        .open_gguf(Gguf::from_writer(writer).unwrap())
        .unwrap_err();
    let told = damaged.to_string();
    assert!(
        told.contains("blk.1.ffn_up.weight, row 0: value 50"),
        "{told}"
    );
}
