//! What the files of a checkpoint say of images.

use crate::convert::config::{Config, read_json};
use crate::io::Failure;
use serde_json::{Map, Value as Json};
use std::path::Path;

/// What the files of a folder say of images.
pub(super) struct Settings {
    /// `config.json`, with the text model's keys.
    pub(super) model: Config,
    /// `vision_config` in it.
    pub(super) vision: Config,
    /// `preprocessor_config.json`, and what `processor_config.json` has in its place.
    pub(super) pictures: Config,
    /// Files with added tokens.
    pub(super) tokens: Vec<Json>,
}

impl Settings {
    pub(super) fn open(folder: &Path) -> Result<Settings, Failure> {
        let path = folder.join("config.json");
        let model = Config::open(folder)?;
        let object = |json: Option<Json>| match json {
            Some(Json::Object(keys)) => keys,
            _ => Map::new(),
        };
        let vision = object(read_json(&path)?.and_then(|mut all| {
            let vision = all.get_mut("vision_config")?;
            Some(vision.take())
        }));
        if vision.is_empty() {
            return Err(model.refuse("there is no vision_config: the model reads no images"));
        }
        let of_pictures = folder.join("preprocessor_config.json");
        let mut pictures = object(read_json(&of_pictures)?);
        let mut all = object(read_json(&folder.join("processor_config.json"))?);
        pictures.extend(object(all.remove("image_processor")));
        let files = ["tokenizer_config.json", "tokenizer.json"];
        let files = files.map(|file| read_json(&folder.join(file)));
        Ok(Settings {
            model,
            vision: Config::of(path, vision),
            pictures: Config::of(of_pictures, pictures),
            tokens: files
                .into_iter()
                .filter_map(Result::transpose)
                .collect::<Result<_, _>>()?,
        })
    }

    pub(super) fn refuse(&self, what: impl std::fmt::Display) -> Failure {
        self.model.refuse(what)
    }

    /// A count of the encoder; that of a list, for width and height, is the first.
    pub(super) fn count(&self, name: &str) -> Result<u32, Failure> {
        if let Some((_, Json::Array(_))) = self.vision.get(&[name])
            && let Some([n, ..]) = self.vision.opt_counts(name)?.as_deref()
        {
            return Ok(*n as u32);
        }
        self.vision.u32(name)
    }

    pub(super) fn first(&self, names: &[&str]) -> Result<u32, Failure> {
        let n = self.vision.opt_u32(names)?;
        n.ok_or_else(|| {
            self.vision
                .missing(&format!("vision_config: {}", names.join(" or ")))
        })
    }

    pub(super) fn n_head(&self) -> Result<u32, Failure> {
        self.first(&["num_attention_heads", "num_heads"])
    }

    /// Whether what the configuration leaves out is what transformers takes for LLaVA.
    fn is_llava(&self) -> Result<bool, Failure> {
        let names = self.model.opt_strs("architectures")?.unwrap_or_default();
        Ok(names.iter().any(|name| name.starts_with("Llava")))
    }

    /// Layers that are computed: `vision_feature_layer` counts from the end, -1 being all of them.
    pub(super) fn n_layer(&self) -> Result<u32, Failure> {
        const MAX: u32 = 1 << 10;
        let n = self.first(&["num_hidden_layers", "depth"])?;
        let from_end = match self.model.get(&["vision_feature_layer"]) {
            Some((_, layer)) => layer.as_i64().ok_or_else(|| {
                self.refuse(format_args!(
                    "vision_feature_layer is {layer}, and one layer's features are read"
                ))
            })?,
            None if self.is_llava()? => -2,
            None => -1,
        };
        let computed = i64::from(n) + 1 + from_end;
        match u32::try_from(computed) {
            Ok(computed) if n <= MAX && (1..=n).contains(&computed) && from_end < 0 => Ok(computed),
            _ => Err(self.refuse(format_args!("layer {from_end} of {n} of the encoder"))),
        }
    }

    /// Layers whose outputs reach the model.
    pub(super) fn deepstack(&self) -> Result<Vec<i32>, Failure> {
        Ok(self
            .vision
            .opt_counts("deepstack_visual_indexes")?
            .unwrap_or_default())
    }

    /// Sizes of grids of tiles, height and width alternately.
    pub(super) fn pinpoints(&self) -> Result<Option<Vec<i32>>, Failure> {
        let Some((name, list)) = self.model.get(&["image_grid_pinpoints"]) else {
            return Ok(None);
        };
        let number = |n: &Json| i32::try_from(n.as_u64()?).ok();
        let pair = |pair: &Json| match &pair.as_array()?[..] {
            [a, b] => Some([number(a)?, number(b)?]),
            _ => None,
        };
        let pairs: Option<Vec<[i32; 2]>> =
            list.as_array().and_then(|l| l.iter().map(pair).collect());
        let wrong = || self.refuse(format_args!("{name} is no list of pairs"));
        Ok(Some(pairs.ok_or_else(wrong)?.concat()))
    }

    /// The id of an added token.
    pub(super) fn token(&self, text: &str) -> Result<usize, Failure> {
        let is = |token: &Json| token.get("content").and_then(Json::as_str) == Some(text);
        let find = |file: &Json| {
            let by_id = file.get("added_tokens_decoder").and_then(Json::as_object);
            let by_id = by_id.into_iter().flatten().find(|(_, token)| is(token));
            let listed = file.get("added_tokens").and_then(Json::as_array);
            let listed = listed.into_iter().flatten().find(|token| is(token));
            let listed = listed.and_then(|token| token.get("id")?.as_u64());
            by_id.and_then(|(id, _)| id.parse().ok()).or(listed)
        };
        let id = self.tokens.iter().find_map(find);
        let id = id.ok_or_else(|| {
            self.refuse(format_args!("the tokenizer's files have no token {text}"))
        })?;
        Ok(id as usize)
    }
}
