//! What the APIs have in common: how tokens are chosen, how an answer ends and is told.

use crate::flags::lark_or_gbnf;
use crate::serve::app::{App, ServedAdapter};
use crate::serve::http::error::ApiError;
use crate::serve::http::fields::Fields;
use crate::serve::http::ignored::Ignored;
use ruvllm::KvType;
use ruvllm::Sampler;
use ruvllm::SamplerOptions;
use ruvllm::chat::tools::LoosenedTool;
use ruvllm::engine::CacheMode;
use ruvllm::grammar::{Grammar, Loosened};
use ruvllm::lora::Adapter;
use ruvllm::sample::{Mirostat, TokenMask};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Most answers to one prompt.
const MAX_ANSWERS: usize = 64;
/// Most strings that end an answer.
const MAX_STOPS: usize = 64;
/// Most bytes of all of them: each answer that waits has its own.
const MAX_STOP_BYTES: usize = 16 << 10;
/// Most biases on tokens: each answer that waits has its own.
const MAX_BIASES: usize = 16 << 10;
/// Most bytes of the name of who asks.
const MAX_USER: usize = 512;

/// How to answer.
pub(crate) struct Params {
    sampling: SamplerOptions,
    pub(crate) seed: u64,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stop: Vec<String>,
    /// Answers to each prompt.
    pub(crate) n: usize,
    pub(crate) stream: bool,
    /// Whether a stream ends with the numbers of tokens.
    pub(crate) include_usage: bool,
    /// Whether every part of a stream has them, as far as it has come.
    pub(crate) continuous_usage: bool,
    pub(crate) priority: i32,
    /// Precision of its keys and values, if not the server's.
    pub(crate) kv_type: Option<KvType>,
    pub(crate) adapters: Vec<ChosenAdapter>,
    /// The slot that its text is in at the end.
    pub(crate) slot: Option<usize>,
    /// How it uses the prefix cache, if not as the server does.
    pub(crate) cache: Option<CacheMode>,
    pub(crate) min_cache_tokens: Option<usize>,
    /// Whether it is told what its user has had remembered, if it is a conversation, and answered with
    /// what the model has learnt of that.
    pub(crate) uses_memory: bool,
    /// Who asks, by the client's account: what `ruvllm learn forget` forgets.
    pub(crate) user: Option<String>,
}

/// Sets what the request gives: `field => method`.
macro_rules! set {
    ($fields:ident, $options:ident, $($name:literal => $field:ident),+ $(,)?) => {
        $(if let Some(value) = $fields.take($name)? { $options.$field = value; })+
    };
}

/// An adapter of a request.
pub(crate) struct ChosenAdapter {
    pub(crate) name: String,
    pub(crate) adapter: Arc<Adapter>,
    pub(crate) scale: f32,
}

impl Params {
    pub(crate) fn of(app: &App, fields: &mut Fields) -> Result<Params, ApiError> {
        let model = fields.take::<String>("model")?;
        let adapters = adapters(app, model.as_deref(), fields.take("lora")?)?;
        let (sampling, seed) = sampling(app, fields)?;
        fields.rename("n_cmpl", "n")?;
        let n = fields.take("n")?.unwrap_or(1);
        if !(1..=MAX_ANSWERS).contains(&n) {
            return Err(ApiError::field(
                "n",
                format!("expected 1 to {MAX_ANSWERS}, found {n}"),
            ));
        }
        let stop = stops(fields)?;
        let (include_usage, continuous_usage) = match fields.object("stream_options")? {
            None => (false, false),
            Some(mut options) => {
                let usage = (
                    options.flag("include_usage")?,
                    options.flag("continuous_usage_stats")?,
                );
                // Padding against eavesdroppers.
                options.ignore(&["include_obfuscation"]);
                options.finish()?;
                usage
            }
        };
        let user: Option<String> = fields.take("user")?;
        if user.as_ref().is_some_and(|user| user.len() > MAX_USER) {
            return Err(ApiError::field(
                "user",
                format!("it has more than {MAX_USER} bytes"),
            ));
        }
        without_effect(fields)?;
        Ok(Params {
            sampling,
            seed,
            max_tokens: match max_tokens(fields)? {
                Some(n) => usize::try_from(n).ok(),
                None => app.max_tokens,
            },
            stop: app.stop.iter().cloned().chain(stop).collect(),
            n,
            stream: fields.flag("stream")?,
            include_usage,
            continuous_usage,
            priority: fields.take("priority")?.unwrap_or(0),
            kv_type: kv_type(fields)?,
            adapters,
            slot: slot(app, fields)?,
            cache: cache(fields)?,
            min_cache_tokens: fields.take("min_cache_tokens")?,
            uses_memory: fields.take("use_memory")?.unwrap_or(true),
            user,
        })
    }

    /// The sampler of answer `i`: each has luck of its own.
    pub(crate) fn sampler(
        &self,
        i: usize,
        mask: Option<Box<dyn TokenMask>>,
    ) -> Result<Sampler, ApiError> {
        let mut sampler = Sampler::new(SamplerOptions {
            seed: Some(self.seed.wrapping_add(i as u64)),
            ..self.sampling.clone()
        })
        .map_err(|error| ApiError::wrong(error.to_string()))?;
        sampler.set_mask(mask);
        Ok(sampler)
    }
}

/// llama-server's `id_slot`, which says something where slots can be saved; -1 is none.
fn slot(app: &App, fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let id: Option<i64> = fields.take("id_slot")?;
    let id = id.filter(|&id| id != -1 && app.slots.is_some());
    let known = |id: i64| usize::try_from(id).ok().filter(|&id| id < app.n_parallel);
    id.map(|id| {
        known(id).ok_or_else(|| {
            let n = app.n_parallel;
            ApiError::field(
                "id_slot",
                format!("expected -1 or a slot below {n}, found {id}"),
            )
        })
    })
    .transpose()
}

/// llama-server's `cache_prompt`; besides a flag, `"read"` is what is there, without adding to it.
fn cache(fields: &mut Fields) -> Result<Option<CacheMode>, ApiError> {
    Ok(match fields.take::<Value>("cache_prompt")? {
        None => None,
        Some(Value::Bool(true)) => Some(CacheMode::On),
        Some(Value::Bool(false)) => Some(CacheMode::Off),
        Some(Value::String(word)) if word == "read" => Some(CacheMode::ReadOnly),
        Some(other) => {
            let message = format!("expected true, false or \"read\", found {other}");
            return Err(ApiError::field("cache_prompt", message));
        }
    })
}

fn kv_type(fields: &mut Fields) -> Result<Option<KvType>, ApiError> {
    let name = fields.take::<String>("kv_type")?;
    name.map(|name| {
        name.parse()
            .map_err(|error| ApiError::field("kv_type", error))
    })
    .transpose()
}

/// How tokens are sampled, and the seed.
fn sampling(app: &App, fields: &mut Fields) -> Result<(SamplerOptions, u64), ApiError> {
    let mut options = app.sampling.clone();
    let (breaker_texts, breakers) = &app.breakers;
    fields.only("dry_sequence_breakers", json!(breaker_texts))?;
    if fields
        .get("dry_multiplier")
        .and_then(Value::as_f64)
        .is_some_and(|x| x != 0.0)
    {
        options.dry_sequence_breakers.clone_from(breakers);
    }
    set!(fields, options,
        "temperature" => temperature, "top_p" => top_p, "min_p" => min_p, "typical_p" => typical,
        "top_n_sigma" => top_n_sigma, "dynatemp_range" => dynatemp_range, "dynatemp_exponent" => dynatemp_exponent,
        "repeat_last_n" => repeat_last_n, "repeat_penalty" => repeat_penalty,
        "presence_penalty" => presence_penalty, "frequency_penalty" => frequency_penalty,
        "dry_multiplier" => dry_multiplier, "dry_base" => dry_base, "dry_allowed_length" => dry_allowed_length,
        "dry_penalty_last_n" => dry_penalty_last_n, "xtc_probability" => xtc_probability,
        "xtc_threshold" => xtc_threshold, "mirostat_tau" => mirostat_tau, "mirostat_eta" => mirostat_eta,
    );
    // 0 and -1 turn it off.
    if let Some(k) = fields.take::<i64>("top_k")? {
        options.top_k = usize::try_from(k).unwrap_or(0);
    }
    if let Some(version) = fields.take::<u8>("mirostat")? {
        options.mirostat = match version {
            0 => Mirostat::Off,
            1 => Mirostat::V1,
            2 => Mirostat::V2,
            _ => return Err(ApiError::field("mirostat", "expected 0, 1 or 2")),
        };
    }
    if let Some(names) = fields.take::<Vec<String>>("samplers")? {
        options.samplers = Some(names.join(";"));
    }
    let mut bias = biases(app, fields.take("logit_bias")?)?;
    if fields.flag("ignore_eos")? {
        bias.extend(app.tokenizer.eog().map(|id| (id, f32::NEG_INFINITY)));
    }
    let seed = fields
        .take::<i64>("seed")?
        .filter(|&seed| seed != -1)
        .map_or_else(|| app.seed(), |seed| seed as u64);
    if bias.len() > MAX_BIASES {
        return Err(ApiError::field(
            "logit_bias",
            format!("expected at most {MAX_BIASES} tokens"),
        ));
    }
    options.logit_bias.extend(bias);
    // Says what makes no sense before anything else is done.
    Sampler::new(options.clone()).map_err(|error| ApiError::wrong(error.to_string()))?;
    Ok((options, seed))
}

/// Strings that end an answer.
fn stops(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let stop: Vec<String> = match fields.take("stop")? {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop],
        Some(list) => {
            serde_json::from_value(list).map_err(|error| ApiError::field("stop", error))?
        }
    };
    if stop.len() > MAX_STOPS {
        return Err(ApiError::field(
            "stop",
            format!("expected at most {MAX_STOPS} strings, found {}", stop.len()),
        ));
    }
    if stop.iter().map(String::len).sum::<usize>() > MAX_STOP_BYTES {
        return Err(ApiError::field(
            "stop",
            format!("the strings have more than {MAX_STOP_BYTES} bytes"),
        ));
    }
    Ok(stop)
}

/// Fields that change nothing here, and those of which only the value that changes nothing is
/// known.
fn without_effect(fields: &mut Fields) -> Result<(), ApiError> {
    fields.ignore(&[
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "verbosity",
        "n_cache_reuse",
        "timings_per_token",
        "return_progress",
    ]);
    // What SGLang's router adds to every request.
    for (name, value) in [
        ("no_stop_trim", false),
        ("return_hidden_states", false),
        ("skip_special_tokens", true),
        ("separate_reasoning", true),
        ("stream_reasoning", true),
        // What llama-server's clients send with the default.
        ("reasoning_control", false),
        ("parse_tool_calls", true),
    ] {
        fields.only(name, value)?;
    }
    fields.only("repetition_penalty", 1.0)?;
    fields.only("min_keep", 0)?;
    fields.only("modalities", json!(["text"]))?;
    // Reasoning is told apart, which is what `deepseek` asks for.
    if fields
        .take::<String>("reasoning_format")?
        .is_some_and(|name| name != "auto" && name != "deepseek")
    {
        return Err(ApiError::field(
            "reasoning_format",
            "expected \"auto\" or \"deepseek\"",
        ));
    }
    Ok(())
}

/// The adapters of a request: those that llama-server's `lora` (`[{"id": 0, "scale": 0.5}]`) lists,
/// or the one behind the colon of `model`, or all with the scales that they were loaded with. Other
/// names are of models: there is one, and the answer says which.
fn adapters(
    app: &App,
    model: Option<&str>,
    lora: Option<Vec<Value>>,
) -> Result<Vec<ChosenAdapter>, ApiError> {
    let served = app.adapters();
    let chosen = |of: &ServedAdapter, scale| {
        let adapter = app
            .registry
            .get(&of.key())
            .map_err(|error| ApiError::internal(error.to_string()))?;
        Ok(ChosenAdapter {
            name: of.name.clone(),
            adapter,
            scale,
        })
    };
    if let Some(list) = lora {
        let of = |entry: &Value| {
            let found = served.get(usize::try_from(entry["id"].as_u64()?).ok()?)?;
            let scale = entry["scale"]
                .as_f64()
                .map(|scale| scale as f32)
                .filter(|scale| scale.is_finite())?;
            Some((found, scale))
        };
        let wrong = |entry: &Value| {
            let n = served.len();
            ApiError::field(
                "lora",
                format!("expected an id below {n} and a scale, found {entry}"),
            )
        };
        let of = |entry| {
            of(entry)
                .ok_or_else(|| wrong(entry))
                .and_then(|(found, scale)| chosen(found, scale))
        };
        return list.iter().map(of).collect();
    }
    let name = model.and_then(|model| Some(model.rsplit_once(':')?.1));
    let named = served.iter().find(|adapter| name == Some(&adapter.name));
    if let Some(adapter) = named {
        return Ok(vec![chosen(adapter, adapter.own_scale)?]);
    }
    let asked = served.iter().map(|adapter| (adapter, adapter.scale()));
    asked
        .filter(|(_, scale)| *scale != 0.0)
        .map(|(adapter, scale)| chosen(adapter, scale))
        .collect()
}

/// Most tokens of an answer, under any of its names; -1 is as many as fit.
fn max_tokens(fields: &mut Fields) -> Result<Option<i64>, ApiError> {
    let mut found = None;
    for name in ["max_tokens", "max_completion_tokens", "n_predict"] {
        let Some(n) = fields.take::<i64>(name)? else {
            continue;
        };
        if n < -1 {
            return Err(ApiError::field(
                name,
                format!("expected -1 or more, found {n}"),
            ));
        }
        if found.is_some_and(|other| other != n) {
            return Err(ApiError::field(
                name,
                "another field has another limit of tokens",
            ));
        }
        found = Some(n);
    }
    Ok(found)
}

/// `{"15043": -100}`, or llama.cpp's `[[15043, -100], [" the", false]]`.
fn biases(app: &App, value: Option<Value>) -> Result<Vec<(u32, f32)>, ApiError> {
    let n_vocab = app.tokenizer.n_vocab();
    let wrong = |found: &dyn std::fmt::Display| {
        ApiError::field(
            "logit_bias",
            format!("expected tokens below {n_vocab} and numbers, found {found}"),
        )
    };
    let id = |id: u64| u32::try_from(id).ok().filter(|&id| (id as usize) < n_vocab);
    let bias = |value: &Value| match value {
        Value::Bool(false) => Some(f32::NEG_INFINITY),
        value => value
            .as_f64()
            .map(|bias| bias as f32)
            .filter(|bias| bias.is_finite()),
    };
    match value {
        None => Ok(Vec::new()),
        Some(Value::Object(biases)) => {
            let pair = |key: &str, value| Some((id(key.parse().ok()?)?, bias(value)?));
            let pairs = biases.iter().map(|(key, value)| {
                pair(key, value).ok_or_else(|| wrong(&format!("{key}: {value}")))
            });
            pairs.collect()
        }
        Some(Value::Array(biases)) => {
            let mut all = Vec::new();
            for pair in &biases {
                let Some([token, value]) = pair.as_array().map(Vec::as_slice) else {
                    return Err(wrong(pair));
                };
                let value = bias(value).ok_or_else(|| wrong(pair))?;
                match token {
                    Value::String(text) => all.extend(
                        app.tokenizer
                            .encode(text, false, true)
                            .into_iter()
                            .map(|id| (id, value)),
                    ),
                    token => all.push((
                        token.as_u64().and_then(id).ok_or_else(|| wrong(pair))?,
                        value,
                    )),
                }
            }
            Ok(all)
        }
        Some(other) => Err(wrong(&other)),
    }
}

/// What the text has to be: `response_format`, or llama.cpp's `grammar` and `json_schema`. Takes a
/// while for large schemas.
pub(crate) fn mask(app: &App, format: &Format) -> Result<Option<Box<dyn TokenMask>>, ApiError> {
    let grammar = match &format.wanted {
        None => return Ok(app.mask.clone()),
        Some((_, Wanted::Schema { schema, is_strict })) => match is_strict {
            true => Grammar::json_schema(&app.trie()?, schema),
            false => Grammar::lenient_json_schema(&app.trie()?, schema),
        },
        Some((_, Wanted::Grammar(grammar))) => {
            let (syntax, source) = lark_or_gbnf(grammar);
            Grammar::new(&app.trie()?, syntax, source)
        }
    };
    let name = format.wanted.as_ref().map_or("", |(name, _)| name);
    let grammar = grammar.map_err(|error| ApiError::field(name, error))?;
    for Loosened { keyword, path, .. } in grammar.loosened() {
        format.ignore(&format!("{name}{path}/{keyword}"));
    }
    Ok(Some(Box::new(grammar.matcher())))
}

/// What the text has to be.
pub(crate) struct Format {
    /// In which field it was said.
    wanted: Option<(&'static str, Wanted)>,
    /// Where it is told what is not enforced.
    ignored: Ignored,
}

enum Wanted {
    /// JSON that a schema describes; what cannot be enforced is refused if it is strict.
    Schema { schema: String, is_strict: bool },
    /// A text of a grammar in GBNF or Lark.
    Grammar(String),
}

impl Wanted {
    fn schema(schema: &Value, is_strict: bool) -> Wanted {
        Wanted::Schema {
            schema: schema.to_string(),
            is_strict,
        }
    }
}

impl Format {
    pub(crate) fn of(fields: &mut Fields) -> Result<Format, ApiError> {
        let mut found = Vec::new();
        if let Some(grammar) = fields
            .take::<String>("grammar")?
            .filter(|grammar| !grammar.is_empty())
        {
            found.push(("grammar", Wanted::Grammar(grammar)));
        }
        if let Some(schema) = fields.take::<Value>("json_schema")? {
            found.push(("json_schema", Wanted::schema(&schema, false)));
        }
        const NAME: &str = "response_format";
        if let Some(mut format) = fields.object(NAME)? {
            let kind: String = format.need("type")?;
            let schema = match &kind[..] {
                "text" => None,
                "json_object" => {
                    let schema = format.take::<Value>("schema")?;
                    let schema = schema.unwrap_or_else(|| json!({"type": "object"}));
                    Some(Wanted::schema(&schema, false))
                }
                "json_schema" => {
                    let mut described = format
                        .object("json_schema")?
                        .ok_or_else(|| ApiError::field(NAME, "no json_schema"))?;
                    described.ignore(&["name", "description"]);
                    let is_strict = described.flag("strict")?;
                    let schema = described.need::<Value>("schema")?;
                    described.finish()?;
                    Some(Wanted::schema(&schema, is_strict))
                }
                other => {
                    return Err(ApiError::field(
                        NAME,
                        format!("the type {other:?} is none of text, json_object, json_schema"),
                    ));
                }
            };
            format.finish()?;
            found.extend(schema.map(|schema| (NAME, schema)));
        }
        let first = found.pop();
        match found.pop() {
            Some((name, _)) => Err(ApiError::field(
                name,
                "another field says what the text has to be, too",
            )),
            None => Ok(Format {
                wanted: first,
                ignored: fields.ignored().clone(),
            }),
        }
    }

    /// Names something of the request that is not enforced.
    fn ignore(&self, name: &str) {
        self.ignored.add(name);
    }

    /// Names what is not enforced of the parameters of tools.
    pub(super) fn ignore_in_tools(&self, loosened: &[LoosenedTool]) {
        for of in loosened {
            let (index, path, keyword) = (of.index, &of.path, &of.keyword);
            self.ignore(&format!("tools[{index}]{path}/{keyword}"));
        }
    }

    /// Whether it is free.
    pub(crate) fn is_text(&self) -> bool {
        self.wanted.is_none()
    }
}

/// A format in the words of chat completions: elsewhere a schema lies beside its type, there in an
/// object of its own.
pub(crate) fn schema_format(mut format: Map<String, Value>) -> Value {
    match format.get("type").and_then(Value::as_str) {
        Some("json_schema") => {
            format.shift_remove("type");
            json!({"type": "json_schema", "json_schema": format})
        }
        _ => format.into(),
    }
}
