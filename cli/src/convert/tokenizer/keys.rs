//! The keys that describe a vocabulary in a GGUF file.

use super::{FLAGS, MAX_MODEL, SPECIAL, Tokenizer, USER_DEFINED, steps};
use crate::convert::config::{Config, read_file, read_json};
use crate::convert::family::{Family, Spaces};
use crate::convert::world;
use crate::io::Failure;
use ruvllm::gguf::{Array, Value};
use serde_json::Value as Json;

/// Tokens that Gemma 4 writes around thoughts and calls.
const GEMMA4_SHOWN: [&str; 7] = [
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    r#"<|"|>"#,
];

/// Special tokens that all files of an architecture name by number.
const BY_NUMBER: [(&str, &str, u32); 9] = [
    ("gemma", "eot", 107),
    ("nemotron", "padding", 0),
    ("nemotron", "unknown", 1),
    // Token 0 is the only one that is none of a text; 261 is an empty line, which ends an answer.
    ("rwkv6", "bos", 0),
    ("rwkv6", "eos", 0),
    ("rwkv6", "eot", 261),
    ("rwkv7", "bos", 0),
    ("rwkv7", "eos", 0),
    ("rwkv7", "eot", 261),
];

/// Receives a key, without `tokenizer.`, and its value.
type Put<'p> = dyn FnMut(&str, Value) + 'p;

impl Tokenizer {
    /// Writes the keys, in the order that llama.cpp writes.
    pub(in crate::convert) fn write(
        &self,
        config: &Config,
        family: &Family,
        key: &mut dyn FnMut(String, Value),
    ) -> Result<(), Failure> {
        let put: &mut Put<'_> = &mut |name, value: Value| key(format!("tokenizer.{name}"), value);
        let ends = self.ends();
        self.write_tokens(family, put)?;
        self.write_special(config, family, &ends, put)?;
        self.write_additions(family, &ends, put);
        if matches!(self.model, "bert" | "t5") {
            put(
                "ggml.token_type_count",
                config.u32("type_vocab_size")?.into(),
            );
        }
        if let Some(json) = &self.json {
            write_normalizer(json, put);
            if self.model == "t5" {
                self.write_unigram(json, put);
            }
        }
        self.write_space_prefix(family, put);
        self.write_templates(put)
    }

    /// The model, and texts, scores, types and merges of tokens.
    fn write_tokens(&self, family: &Family, put: &mut Put<'_>) -> Result<(), Failure> {
        let is_gemma4 = family.arch == "gemma4";
        put(
            "ggml.model",
            if is_gemma4 { family.arch } else { self.model }.into(),
        );
        if !is_gemma4 && self.model != "rwkv" {
            put("ggml.pre", self.pre.into());
        }
        put(
            "ggml.tokens",
            Value::Array(Array::Strings(self.tokens.iter().collect())),
        );
        if let Some(scores) = &self.scores {
            put("ggml.scores", Value::Array(Array::F32(scores.clone())));
        }
        let mut types = self.types.clone();
        let mut merges = self.merges.clone();
        if let Some(json) = self.json.as_ref().filter(|_| is_gemma4) {
            // What marks calls is always shown.
            let shown = |token: &[u8]| GEMMA4_SHOWN.iter().any(|text| text.as_bytes() == token);
            let marks = types
                .iter_mut()
                .zip(&self.tokens)
                .filter(|(_, token)| shown(token));
            marks.for_each(|(kind, _)| *kind = USER_DEFINED);
            merges = self.read_merges(json)?;
        }
        put("ggml.token_type", Value::Array(Array::I32(types)));
        for (ids, flag) in self.flagged.iter().zip(FLAGS) {
            let ids = ids.iter().copied();
            let ids: Vec<i32> = ids.filter(|id| (*id as usize) < self.len()).collect();
            if !ids.is_empty() {
                put(
                    &format!("ggml.added_tokens.{flag}"),
                    Value::Array(Array::I32(ids)),
                );
            }
        }
        if !merges.is_empty() {
            put(
                "ggml.merges",
                Value::Array(Array::Strings(merges.iter().collect())),
            );
        }
        Ok(())
    }

    /// Numbers of special tokens.
    fn write_special(
        &self,
        config: &Config,
        family: &Family,
        ends: &Ends,
        put: &mut Put<'_>,
    ) -> Result<(), Failure> {
        // BERT's token for a whole text is the one that texts begin with.
        for (name, ggml) in SPECIAL.into_iter().filter(|(name, _)| *name != "cls") {
            let text = ends
                .texts
                .iter()
                .find(|(special, _)| *special == name)
                .map(|(_, text)| text.as_str());
            let by_text = text
                .or_else(|| self.special_text(&format!("{name}_token")))
                .and_then(|text| self.added_id(text));
            let by_number = || {
                config
                    .opt_u32(&[&format!("{name}_token_id")])
                    .ok()
                    .flatten()
            };
            let special = family.special.iter().find(|(special, _)| *special == ggml);
            let by_family = || self.added_id(special?.1);
            if let Some(id) = by_text
                .or_else(by_number)
                .or_else(by_family)
                .filter(|id| (*id as usize) < self.len())
            {
                put(&format!("ggml.{ggml}_token_id"), id.into());
            }
        }
        let further = family
            .special
            .iter()
            .filter(|(name, _)| SPECIAL.iter().all(|(_, ggml)| ggml != name));
        for (name, text) in further {
            let id = self.added_id(text).filter(|id| (*id as usize) < self.len());
            let id = id.ok_or_else(|| {
                self.refuse("tokenizer.json", format_args!("there is no token {text}"))
            })?;
            put(&format!("ggml.{name}_token_id"), id.into());
        }
        for (_, name, id) in BY_NUMBER
            .into_iter()
            .filter(|(arch, ..)| *arch == family.arch)
        {
            put(&format!("ggml.{name}_token_id"), id.into());
        }
        if family.arch == "hunyuan-dense" {
            self.write_hunyuan(config, put)?;
        }
        Ok(())
    }

    /// Ends of texts and turns of Hunyuan's models; of their files only these are right.
    fn write_hunyuan(&self, config: &Config, put: &mut Put<'_>) -> Result<(), Failure> {
        if let Some(id) = config.opt_u32(&["eod_token_id"])? {
            put("ggml.eos_token_id", id.into());
        }
        let generation =
            read_json(&self.folder.join("generation_config.json"))?.unwrap_or_default();
        let ends = generation
            .get("eos_token_id")
            .and_then(Json::as_array)
            .filter(|ends| ends.len() > 1);
        if let Some(id) = ends.and_then(|ends| u32::try_from(ends[0].as_u64()?).ok()) {
            put("ggml.eot_token_id", id.into());
        }
        Ok(())
    }

    /// Whether special tokens are put around a text.
    fn write_additions(&self, family: &Family, ends: &Ends, put: &mut Put<'_>) {
        if family.arch == "modern-bert" {
            put("ggml.add_sep_token", true.into());
        }
        for (name, _) in SPECIAL {
            let add = ends
                .adds
                .iter()
                .find(|(special, _)| *special == name)
                .map(|(_, add)| *add);
            let setting = || {
                self.settings
                    .as_ref()?
                    .get(format!("add_{name}_token"))?
                    .as_bool()
            };
            if let Some(add) = add
                .or_else(setting)
                .filter(|_| matches!(name, "bos" | "eos" | "sep"))
            {
                put(&format!("ggml.add_{name}_token"), add.into());
            }
        }
        if family.arch == "gemma4" {
            put("ggml.add_bos_token", true.into());
        }
    }

    /// What a unigram vocabulary does with spaces and characters.
    fn write_unigram(&self, json: &Json, put: &mut Put<'_>) {
        let is = |step: &Json, name: &str| step.get("type").and_then(Json::as_str) == Some(name);
        let prefix = steps(json, "pre_tokenizer", "pretokenizers").any(|step| {
            let never = step.get("prepend_scheme").and_then(Json::as_str) == Some("never");
            is(step, "Metaspace") && !never && flag(step.get("add_prefix_space")) != Some(false)
        });
        let splits =
            steps(json, "pre_tokenizer", "pretokenizers").any(|step| is(step, "WhitespaceSplit"));
        let merges = steps(json, "normalizer", "normalizers").any(|step| is(step, "Replace"));
        put("ggml.add_space_prefix", prefix.into());
        put("ggml.remove_extra_whitespaces", (splits || merges).into());
        if !self.charsmap.is_empty() {
            put(
                "ggml.precompiled_charsmap",
                Value::Array(Array::U8(self.charsmap.clone())),
            );
        }
    }

    /// Whether a space is put before a text.
    fn write_space_prefix(&self, family: &Family, put: &mut Put<'_>) {
        let setting = flag(
            self.settings
                .as_ref()
                .and_then(|settings| settings.get("add_prefix_space")),
        );
        match (family.spaces, setting) {
            (Spaces::Trained, _) => {
                if let Some(add) = self.adds_space {
                    put("ggml.add_space_prefix", add.into());
                }
            }
            (Spaces::Never, _) if self.scores.is_some() => {
                put("ggml.add_space_prefix", false.into())
            }
            (Spaces::Setting, Some(add)) => put("ggml.add_space_prefix", add.into()),
            _ => {}
        }
    }

    /// The number of a token that `tokenizer.json` lists as added.
    fn added_id(&self, text: &str) -> Option<u32> {
        let added = self.json.as_ref()?.get("added_tokens")?.as_array()?;
        let token = added
            .iter()
            .find(|token| token.get("content").and_then(Json::as_str) == Some(text))?;
        token.get("id")?.as_u64()?.try_into().ok()
    }

    /// What the post-processor of `tokenizer.json` puts around a text.
    fn ends(&self) -> Ends {
        let mut ends = Ends::default();
        let Some(post) = self
            .json
            .as_ref()
            .and_then(|json| json.get("post_processor"))
            .filter(|post| !post.is_null())
        else {
            return ends;
        };
        let one = [post.clone()];
        let processors = post
            .get("processors")
            .and_then(Json::as_array)
            .map_or(&one[..], Vec::as_slice);
        for processor in processors {
            match processor.get("type").and_then(Json::as_str) {
                Some("ByteLevel") => ["bos", "eos"]
                    .into_iter()
                    .for_each(|name| ends.or_add(name, false)),
                Some("TemplateProcessing") => {
                    let single = processor
                        .get("single")
                        .and_then(Json::as_array)
                        .map_or(&[][..], Vec::as_slice);
                    let special = |item: Option<&Json>| {
                        item?
                            .get("SpecialToken")?
                            .get("id")?
                            .as_str()
                            .map(str::to_owned)
                    };
                    if single.len() > 1 {
                        for (name, item) in [("bos", single.first()), ("eos", single.last())] {
                            if let Some(text) = special(item) {
                                ends.add(name, true);
                                ends.texts.push((name, text));
                            }
                        }
                    }
                    let pair = processor
                        .get("pair")
                        .and_then(Json::as_array)
                        .map_or(&[][..], Vec::as_slice);
                    if let Some(add) = self.separates(pair, &ends) {
                        ends.add("sep", add);
                    }
                }
                _ => {}
            }
        }
        ends
    }

    /// Whether a pair of texts has a separator between them, if it has anything there: the end of a
    /// text only counts where no text has one.
    fn separates(&self, pair: &[Json], ends: &Ends) -> Option<bool> {
        let special = |item: &Json| {
            item.get("SpecialToken")
                .and_then(|token| token.get("id")?.as_str().map(str::to_owned))
        };
        let is_text = |item: &Json, name: &str| {
            item.get("Sequence")
                .and_then(|text| text.get("id")?.as_str())
                == Some(name)
        };
        let first = pair.iter().position(|item| is_text(item, "A"))?;
        let between = &pair[first + 1
            ..first
                + 1
                + pair[first + 1..]
                    .iter()
                    .position(|item| is_text(item, "B"))?];
        let ends_texts = ends.texts.iter().any(|(name, _)| *name == "eos");
        let separators = [
            self.special_text("sep_token"),
            self.special_text("eos_token"),
        ];
        let separates = |item: &Json| {
            special(item).is_some_and(|text| separators.contains(&Some(text.as_str())))
        };
        match between {
            [] => None,
            [one] => Some(separates(one) && !ends_texts),
            [_, second, ..] => Some(separates(second)),
        }
    }

    /// The chat templates: a file of their own, or a text or list in `tokenizer_config.json`.
    fn write_templates(&self, put: &mut Put<'_>) -> Result<(), Failure> {
        let jinja = read_file(&self.folder.join("chat_template.jinja"), MAX_MODEL)?;
        let json = read_json(&self.folder.join("chat_template.json"))?;
        let setting = self
            .settings
            .as_ref()
            .and_then(|settings| settings.get("chat_template"));
        let setting = setting.filter(|template| !template.is_null()).cloned();
        let template = match (setting, jinja) {
            (Some(setting), _) => Some(setting),
            (None, Some(text)) => {
                let text = String::from_utf8(text)
                    .map_err(|error| self.refuse("chat_template.jinja", error))?;
                Some(Json::String(text))
            }
            (None, None) => json.and_then(|json| json.get("chat_template").cloned()),
        };
        let mut names = Vec::new();
        match template {
            None | Some(Json::Null) if self.model == "rwkv" => {
                put("chat_template", world::TEMPLATE.into())
            }
            None | Some(Json::Null) => {}
            Some(Json::String(text)) => put("chat_template", text.into()),
            Some(Json::Array(list)) => {
                for item in &list {
                    let text = |key: &str| item.get(key).and_then(Json::as_str);
                    let (Some(name), Some(template)) = (text("name"), text("template")) else {
                        return Err(self.refuse(
                            "tokenizer_config.json",
                            "a chat template without a name or a text",
                        ));
                    };
                    let name = name.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
                    match name.as_str() {
                        "default" => put("chat_template", template.into()),
                        _ => {
                            put(&format!("chat_template.{name}"), template.into());
                            names.push(name);
                        }
                    }
                }
            }
            Some(_) => {
                return Err(self.refuse(
                    "tokenizer_config.json",
                    "chat_template is neither a text nor a list",
                ));
            }
        }
        if !names.is_empty() {
            put(
                "chat_templates",
                Value::Array(Array::Strings(names.iter().collect())),
            );
        }
        Ok(())
    }
}

/// What is done with a text before it is split.
fn write_normalizer(json: &Json, put: &mut Put<'_>) {
    for step in steps(json, "normalizer", "normalizers") {
        let (lowercase, strip_accents) = match step.get("type").and_then(Json::as_str) {
            Some("Lowercase") => (Some(true), None),
            Some("StripAccents") => (None, Some(true)),
            Some("BertNormalizer") => {
                (flag(step.get("lowercase")), flag(step.get("strip_accents")))
            }
            _ => (None, None),
        };
        for (name, value) in [("lowercase", lowercase), ("strip_accents", strip_accents)] {
            if let Some(value) = value {
                put(&format!("ggml.normalizer.{name}"), value.into());
            }
        }
    }
}

fn flag(value: Option<&Json>) -> Option<bool> {
    value.and_then(Json::as_bool)
}

/// Tokens around a text.
#[derive(Default)]
struct Ends {
    adds: Vec<(&'static str, bool)>,
    texts: Vec<(&'static str, String)>,
}

impl Ends {
    fn add(&mut self, name: &'static str, add: bool) {
        self.adds.retain(|(known, _)| *known != name);
        self.adds.push((name, add));
    }

    fn or_add(&mut self, name: &'static str, add: bool) {
        if self.adds.iter().all(|(known, _)| *known != name) {
            self.adds.push((name, add));
        }
    }
}
