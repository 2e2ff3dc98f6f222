//! Model families: each maps the metadata of its architecture to [`Hparams`], which specify every
//! layer.

mod apertus;
mod arcee;
mod arctic;
mod bert;
mod bitnet;
mod clamps;
mod cohere;
mod deepseek;
mod deepseek4;
mod diffusion;
mod drafters;
mod exaone;
mod gated;
mod gemma;
mod gemma3n;
mod gemma4;
mod glm;
mod gpt;
mod gpt_oss;
mod granite;
mod grok;
mod grovemoe;
mod hrm_text;
mod hunyuan;
mod hyper;
mod lfm2;
mod llama;
mod mamba;
mod maple;
mod minimax_01;
mod mixtures;
mod nanbeige;
mod neox;
mod olmo;
mod phi;
mod plamo2;
mod qwen;
mod qwen4;
mod rwkv;
mod smollm3;
mod sparse;
mod stablelm;
mod t5;
mod talkie;
mod windows;

use crate::gguf::{Metadata, TensorInfo};
use crate::layers::hparams::Hparams;
use crate::model::ModelError;
use crate::model::keys::{Keys, UnknownNames};
pub(crate) use drafters::{DRAFTERS, DrafterFamily};

/// One architecture.
pub(crate) struct Family {
    /// `general.architecture`.
    pub(crate) arch: &'static str,
    /// Reads its hyper-parameters.
    pub(crate) hparams: fn(&Keys<'_>) -> Result<Hparams, ModelError>,
}

impl Family {
    /// The family called `arch`.
    pub(crate) fn of(arch: &str) -> Result<&'static Family, ModelError> {
        FAMILIES.iter().find(|f| f.arch == arch).ok_or_else(|| {
            ModelError::UnsupportedArchitecture {
                arch: arch.to_owned(),
                supported: FAMILIES.iter().map(|f| f.arch).collect(),
            }
        })
    }
}

/// All architectures this build runs.
pub(crate) static FAMILIES: &[Family] = &[
    Family {
        arch: "llama",
        hparams: llama::hparams,
    },
    Family {
        arch: "mistral",
        hparams: llama::hparams,
    },
    Family {
        arch: "llama4",
        hparams: llama::llama4,
    },
    Family {
        arch: "mistral3",
        hparams: llama::mistral3,
    },
    Family {
        arch: "internlm2",
        hparams: llama::hparams,
    },
    Family {
        arch: "baichuan",
        hparams: llama::baichuan,
    },
    Family {
        arch: "xverse",
        hparams: llama::hparams,
    },
    Family {
        arch: "maincoder",
        hparams: llama::maincoder,
    },
    Family {
        arch: "ernie4_5",
        hparams: llama::ernie4_5,
    },
    Family {
        arch: "ernie4_5-moe",
        hparams: llama::ernie4_5,
    },
    Family {
        arch: "nanbeige",
        hparams: nanbeige::hparams,
    },
    Family {
        arch: "exaone",
        hparams: neox::hparams,
    },
    Family {
        arch: "pangu-embedded",
        hparams: neox::hparams,
    },
    Family {
        arch: "paddleocr",
        hparams: neox::paddleocr,
    },
    Family {
        arch: "openelm",
        hparams: neox::openelm,
    },
    Family {
        arch: "plamo",
        hparams: neox::plamo,
    },
    Family {
        arch: "plamo3",
        hparams: neox::plamo3,
    },
    Family {
        arch: "plamo2",
        hparams: plamo2::hparams,
    },
    Family {
        arch: "refact",
        hparams: llama::refact,
    },
    Family {
        arch: "bitnet",
        hparams: bitnet::hparams,
    },
    Family {
        arch: "hrm_text",
        hparams: hrm_text::hparams,
    },
    Family {
        arch: "deci",
        hparams: llama::deci,
    },
    Family {
        arch: "qwen",
        hparams: qwen::qwen1,
    },
    Family {
        arch: "qwen2",
        hparams: qwen::qwen2,
    },
    Family {
        arch: "qwen2moe",
        hparams: qwen::qwen2moe,
    },
    Family {
        arch: "qwen2vl",
        hparams: qwen::qwen2vl,
    },
    Family {
        arch: "qwen3",
        hparams: qwen::qwen3,
    },
    Family {
        arch: "qwen3moe",
        hparams: qwen::qwen3moe,
    },
    Family {
        arch: "qwen3vl",
        hparams: qwen::qwen3vl,
    },
    Family {
        arch: "qwen3vlmoe",
        hparams: qwen::qwen3vlmoe,
    },
    Family {
        arch: "dream",
        hparams: diffusion::dream,
    },
    Family {
        arch: "llada",
        hparams: diffusion::llada,
    },
    Family {
        arch: "llada-moe",
        hparams: diffusion::llada_moe,
    },
    Family {
        arch: "rnd1",
        hparams: diffusion::rnd1,
    },
    Family {
        arch: "seed_oss",
        hparams: qwen::seed_oss,
    },
    Family {
        arch: "phi2",
        hparams: phi::phi2,
    },
    Family {
        arch: "phi3",
        hparams: phi::phi3,
    },
    Family {
        arch: "phimoe",
        hparams: phi::phimoe,
    },
    Family {
        arch: "gemma",
        hparams: gemma::gemma1,
    },
    Family {
        arch: "gemma2",
        hparams: gemma::gemma2,
    },
    Family {
        arch: "gemma3",
        hparams: gemma::gemma3,
    },
    Family {
        arch: "gemma3n",
        hparams: gemma3n::hparams,
    },
    Family {
        arch: "gemma4",
        hparams: gemma4::hparams,
    },
    Family {
        arch: "gemma-embedding",
        hparams: gemma::embedding,
    },
    Family {
        arch: "bert",
        hparams: bert::bert,
    },
    Family {
        arch: "nomic-bert",
        hparams: bert::nomic,
    },
    Family {
        arch: "nomic-bert-moe",
        hparams: bert::nomic_moe,
    },
    Family {
        arch: "jina-bert-v2",
        hparams: bert::jina2,
    },
    Family {
        arch: "jina-bert-v3",
        hparams: bert::jina3,
    },
    Family {
        arch: "modern-bert",
        hparams: bert::modern,
    },
    Family {
        arch: "eurobert",
        hparams: bert::euro,
    },
    Family {
        arch: "neo-bert",
        hparams: bert::neo,
    },
    Family {
        arch: "llama-embed",
        hparams: bert::llama,
    },
    Family {
        arch: "t5",
        hparams: t5::t5,
    },
    Family {
        arch: "t5encoder",
        hparams: t5::encoder,
    },
    Family {
        arch: "granite",
        hparams: granite::hparams,
    },
    Family {
        arch: "granitemoe",
        hparams: granite::moe,
    },
    Family {
        arch: "granite_swa",
        hparams: granite::swa,
    },
    Family {
        arch: "minicpm",
        hparams: granite::minicpm,
    },
    Family {
        arch: "olmo",
        hparams: olmo::olmo1,
    },
    Family {
        arch: "olmo2",
        hparams: olmo::hparams,
    },
    Family {
        arch: "olmoe",
        hparams: mixtures::olmoe,
    },
    Family {
        arch: "smollm3",
        hparams: smollm3::hparams,
    },
    Family {
        arch: "arcee",
        hparams: arcee::hparams,
    },
    Family {
        arch: "chatglm",
        hparams: glm::chatglm,
    },
    Family {
        arch: "glm4",
        hparams: glm::glm4,
    },
    Family {
        arch: "glm4moe",
        hparams: glm::glm4moe,
    },
    Family {
        arch: "exaone4",
        hparams: exaone::exaone4,
    },
    Family {
        arch: "exaone-moe",
        hparams: exaone::moe,
    },
    Family {
        arch: "command-r",
        hparams: cohere::command_r,
    },
    Family {
        arch: "cohere2",
        hparams: cohere::cohere2,
    },
    Family {
        arch: "cohere2moe",
        hparams: cohere::cohere2moe,
    },
    Family {
        arch: "dbrx",
        hparams: mixtures::dbrx,
    },
    Family {
        arch: "deepseek",
        hparams: mixtures::deepseek,
    },
    Family {
        arch: "deepseek2-ocr",
        hparams: mixtures::deepseek_ocr,
    },
    Family {
        arch: "bailingmoe",
        hparams: mixtures::deepseek,
    },
    Family {
        arch: "maple",
        hparams: maple::hparams,
    },
    Family {
        arch: "arctic",
        hparams: arctic::hparams,
    },
    Family {
        arch: "grok",
        hparams: grok::hparams,
    },
    Family {
        arch: "grovemoe",
        hparams: grovemoe::hparams,
    },
    Family {
        arch: "minimax-01",
        hparams: minimax_01::hparams,
    },
    Family {
        arch: "mellum",
        hparams: mixtures::mellum,
    },
    Family {
        arch: "dots1",
        hparams: mixtures::head_norms,
    },
    Family {
        arch: "hy_v3",
        hparams: mixtures::head_norms,
    },
    Family {
        arch: "bailingmoe2",
        hparams: mixtures::head_norms,
    },
    Family {
        arch: "minimax-m2",
        hparams: mixtures::minimax,
    },
    Family {
        arch: "stablelm",
        hparams: stablelm::stablelm,
    },
    Family {
        arch: "orion",
        hparams: stablelm::stablelm,
    },
    Family {
        arch: "jais",
        hparams: stablelm::jais,
    },
    Family {
        arch: "codeshell",
        hparams: stablelm::starcoder2,
    },
    Family {
        arch: "starcoder2",
        hparams: stablelm::starcoder2,
    },
    Family {
        arch: "nemotron",
        hparams: stablelm::nemotron,
    },
    Family {
        arch: "jais2",
        hparams: stablelm::jais2,
    },
    Family {
        arch: "deepseek2",
        hparams: deepseek::deepseek2,
    },
    Family {
        arch: "mistral4",
        hparams: deepseek::mistral4,
    },
    Family {
        arch: "plm",
        hparams: deepseek::plm,
    },
    Family {
        arch: "minicpm3",
        hparams: deepseek::minicpm3,
    },
    Family {
        arch: "gpt-oss",
        hparams: gpt_oss::hparams,
    },
    Family {
        arch: "gpt2",
        hparams: gpt::gpt2,
    },
    Family {
        arch: "starcoder",
        hparams: gpt::gpt2,
    },
    Family {
        arch: "gptneox",
        hparams: gpt::gptneox,
    },
    Family {
        arch: "falcon",
        hparams: gpt::falcon,
    },
    Family {
        arch: "bloom",
        hparams: gpt::bloom,
    },
    Family {
        arch: "mpt",
        hparams: gpt::mpt,
    },
    Family {
        arch: "apertus",
        hparams: apertus::hparams,
    },
    Family {
        arch: "hunyuan-dense",
        hparams: hunyuan::dense,
    },
    Family {
        arch: "hunyuan_vl",
        hparams: hunyuan::vision,
    },
    Family {
        arch: "hunyuan-moe",
        hparams: hunyuan::moe,
    },
    Family {
        arch: "lfm2",
        hparams: lfm2::lfm2,
    },
    Family {
        arch: "lfm2moe",
        hparams: lfm2::lfm2moe,
    },
    Family {
        arch: "mamba",
        hparams: mamba::mamba,
    },
    Family {
        arch: "mamba2",
        hparams: mamba::mamba2,
    },
    Family {
        arch: "jamba",
        hparams: mamba::jamba,
    },
    Family {
        arch: "rwkv6",
        hparams: rwkv::six,
    },
    Family {
        arch: "rwkv7",
        hparams: rwkv::seven,
    },
    Family {
        arch: "arwkv7",
        hparams: rwkv::arwkv7,
    },
    Family {
        arch: "rwkv6qwen2",
        hparams: rwkv::rwkv6qwen2,
    },
    Family {
        arch: "falcon-h1",
        hparams: mamba::falcon_h1,
    },
    Family {
        arch: "nemotron_h",
        hparams: mamba::nemotron_h,
    },
    Family {
        arch: "nemotron_h_moe",
        hparams: mamba::nemotron_h,
    },
    Family {
        arch: "granitehybrid",
        hparams: granite::hybrid,
    },
    Family {
        arch: "qwen3next",
        hparams: qwen::qwen3next,
    },
    Family {
        arch: "qwen35",
        hparams: qwen::qwen35,
    },
    Family {
        arch: "qwen35moe",
        hparams: qwen::qwen35moe,
    },
    Family {
        arch: "kimi-linear",
        hparams: deepseek::kimi_linear,
    },
    Family {
        arch: "afmoe",
        hparams: windows::afmoe,
    },
    Family {
        arch: "mimo2",
        hparams: windows::mimo2,
    },
    Family {
        arch: "smallthinker",
        hparams: windows::smallthinker,
    },
    Family {
        arch: "bailingmoe3",
        hparams: deepseek::bailing3,
    },
    Family {
        arch: "deepseek32",
        hparams: sparse::deepseek32,
    },
    Family {
        arch: "glm-dsa",
        hparams: sparse::glm_dsa,
    },
    Family {
        arch: "dots3note",
        hparams: sparse::dots3,
    },
    Family {
        arch: "minimax-m3",
        hparams: sparse::minimax3,
    },
    Family {
        arch: "qwen4exp",
        hparams: qwen4::hparams,
    },
    Family {
        arch: "deepseek4",
        hparams: deepseek4::hparams,
    },
    Family {
        arch: "hy_v4",
        hparams: hyper::hunyuan4,
    },
    Family {
        arch: "glm5-next",
        hparams: hyper::glm5,
    },
    Family {
        arch: "kimi-k3",
        hparams: deepseek::kimi3,
    },
    Family {
        arch: "graniteswitch",
        hparams: granite::switch,
    },
    Family {
        arch: "muse-glimmer",
        hparams: gated::muse,
    },
    Family {
        arch: "laguna",
        hparams: gated::laguna,
    },
    Family {
        arch: "talkie",
        hparams: talkie::hparams,
    },
    Family {
        arch: "spark2_5",
        hparams: gated::spark,
    },
    Family {
        arch: "step35",
        hparams: gated::step,
    },
];

/// Most rows of an embedding table.
const MAX_VOCAB: u64 = (1 << 24) - 1;

impl Hparams {
    /// Hyper-parameters of a file, from its header alone.
    ///
    /// # Errors
    /// If its architecture is not supported or a parameter is invalid.
    pub fn of(metadata: &Metadata, tensors: &[TensorInfo]) -> Result<Hparams, ModelError> {
        Hparams::of_with(metadata, tensors, &mut UnknownNames::default())
    }

    /// As [`Hparams::of`]; `unknown` decides what happens to keys that this build does not know.
    pub(crate) fn of_with(
        metadata: &Metadata,
        tensors: &[TensorInfo],
        unknown: &mut UnknownNames,
    ) -> Result<Hparams, ModelError> {
        if let Some(kind) = metadata.opt_str("general.type")?.filter(|&t| t != "model") {
            let what = match kind {
                "adapter" => "an adapter (give it with --lora, besides its model)".into(),
                "learned" => "what was learnt with a model (give its folder with --learn)".into(),
                other => format!("something of type {other:?}"),
            };
            return Err(ModelError::NotAModel { what });
        }
        let arch =
            metadata
                .opt_str("general.architecture")?
                .ok_or_else(|| ModelError::MissingKey {
                    key: "general.architecture".into(),
                })?;
        if DRAFTERS.iter().any(|drafter| drafter.arch == arch) {
            return Err(ModelError::NotAModel {
                what: format!(
                    "a drafter of architecture {arch:?} (give it with -md, besides the model that it was trained for)"
                ),
            });
        }
        let family = Family::of(arch)?;
        if tensors.is_empty() {
            return Err(ModelError::NotAModel {
                what: "a vocabulary without weights".into(),
            });
        }
        let Some(embd) = tensors.iter().find(|t| t.name == "token_embd.weight") else {
            return Err(ModelError::MissingTensor {
                name: "token_embd.weight".into(),
            });
        };
        // Binding checks the other dimensions.
        let n_vocab = embd.dims.get(1).copied().unwrap_or(1);
        if n_vocab > MAX_VOCAB {
            return Err(ModelError::TensorShape {
                name: embd.name.clone(),
                found: embd.dims.clone(),
                expected: vec![embd.dims[0], MAX_VOCAB],
            });
        }
        let keys = Keys::new(arch, metadata, tensors, n_vocab as usize)?;
        let hparams = (family.hparams)(&keys)?;
        if hparams.classifier.is_none() {
            keys.only("pooling_type", &[0.0, 1.0, 2.0, 3.0])?;
        }
        keys.none_ignored(unknown)?;
        Ok(hparams)
    }
}
