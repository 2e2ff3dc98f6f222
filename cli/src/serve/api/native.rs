//! llama-server's own API, as far as it is here.

use crate::flags::judged_of;
use crate::serve::api::body::Body;
use crate::serve::api::openai::prompts;
use crate::serve::app::App;
use crate::serve::blocking::blocking;
use crate::serve::http::budget::Share;
use crate::serve::http::error::ApiError;
use crate::serve::http::fields::Fields;
use crate::serve::http::response::{event, events, json_list, json_response, json_text};
use crate::serve::ids::Caller;
use crate::serve::jobs::answer::{Answer, Step, chat_logprob, timings};
use crate::serve::jobs::params::{Format, Params};
use crate::serve::jobs::turn::{Job, top_logprobs};
use crate::serve::models::{Listed, Shared};
use crate::serve::observe::metrics::{Learning, OfModel};
use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use futures_util::future::try_join_all;
use futures_util::stream::{self, StreamExt};
use ruvllm::{StopReason, TokenText};
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) async fn health(State(shared): State<Shared>) -> Result<Response, ApiError> {
    let loaded = shared.models.all_loaded();
    if loaded.is_empty() && shared.models.are_starting() {
        return Err(ApiError::loading());
    }
    if let Some(time) = loaded.iter().find_map(|app| app.watchdog.stuck()) {
        let message = format!(
            "the engine has computed one pass for {:.1} s",
            time.as_secs_f64()
        );
        return Err(ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "unavailable_error",
            message,
        ));
    }
    Ok(json_response(StatusCode::OK, &json!({"status": "ok"})))
}

pub(super) async fn props(State(shared): State<Shared>, uri: Uri) -> Result<Response, ApiError> {
    let app = shared.app_of_query(&uri).await?;
    let props = json!({
        "default_generation_settings": {"n_ctx": app.n_ctx, "params": defaults(&app)},
        "total_slots": app.n_parallel,
        "model_alias": app.name,
        "model_path": app.path,
        "chat_template": app.template.source(), "is_base_model": app.is_transcript,
        "bos_token": app.bos,
        "eos_token": app.eos,
        "modalities": {"vision": app.images.is_some(), "audio": false},
        "build_info": crate::serve::ids::FINGERPRINT,
    });
    Ok(json_response(StatusCode::OK, &props))
}

/// What a request gets that says nothing, by the names of its fields.
fn defaults(app: &App) -> Value {
    // As the flag was written, not as the nearest f32.
    let number = |x: f32| {
        x.to_string()
            .parse::<f64>()
            .map_or(Value::Null, Value::from)
    };
    let sampling = &app.sampling;
    json!({
        "temperature": number(sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": number(sampling.top_p),
        "min_p": number(sampling.min_p),
        "repeat_penalty": number(sampling.repeat_penalty),
        "presence_penalty": number(sampling.presence_penalty),
        "frequency_penalty": number(sampling.frequency_penalty),
        "max_tokens": app.max_tokens,
        "seed": app.seed,
    })
}

pub(super) async fn tokenize(
    State(shared): State<Shared>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    let app = shared.app_of(&fields).await?;
    let text: String = fields.need("content")?;
    fields.ignore(&["model"]);
    let (add_special, with_pieces) = (fields.flag("add_special")?, fields.flag("with_pieces")?);
    let parse_special = fields.take("parse_special")?.unwrap_or(true);
    fields.finish()?;
    let tokens = blocking(move || {
        let ids = app.tokenizer.encode(&text, add_special, parse_special);
        let piece = |id| match String::from_utf8(app.tokenizer.token_bytes(id).unwrap_or_default())
        {
            Ok(text) => json!(text),
            // A part of a character.
            Err(error) => json!(error.as_bytes()),
        };
        let token = |id| {
            if with_pieces {
                json!({"id": id, "piece": piece(id)})
            } else {
                json!(id)
            }
        };
        Ok(json_list(ids.into_iter().map(token)))
    })
    .await?;
    Ok(json_text(format!("{{\"tokens\":{tokens}}}")))
}

pub(super) async fn detokenize(
    State(shared): State<Shared>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    let app = shared.app_of(&fields).await?;
    let tokens: Vec<u32> = fields.need("tokens")?;
    fields.ignore(&["model"]);
    fields.finish()?;
    let text = blocking(move || {
        app.tokenizer
            .decode_lossy(&tokens, true)
            .map_err(|error| ApiError::field("tokens", error))
    })
    .await?;
    Ok(json_response(StatusCode::OK, &json!({"content": text})))
}

pub(super) async fn apply_template(
    State(shared): State<Shared>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    let app = shared.app_of(&fields).await?;
    fields.ignore(&["model"]);
    let conversation = app.conversation(&mut fields)?;
    fields.finish()?;
    let prompt = blocking(move || conversation.render(&app)).await?.text;
    Ok(json_response(StatusCode::OK, &json!({"prompt": prompt})))
}

/// What runs, and room for more; with `?fail_on_no_slot=1` an error if there is none.
pub(super) async fn slots(State(shared): State<Shared>, uri: Uri) -> Result<Response, ApiError> {
    let app = shared.app_of_query(&uri).await?;
    let mut tasks = app.metrics.running();
    let must_have_room = uri
        .query()
        .is_some_and(|query| query.split('&').any(|pair| pair == "fail_on_no_slot=1"));
    if must_have_room && tasks.len() >= app.n_parallel {
        return Err(ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "unavailable_error",
            "no slot is available",
        ));
    }
    tasks.resize(app.n_parallel, None);
    let slot = |(i, task): (usize, Option<u64>)| json!({"id": i, "id_task": task, "n_ctx": app.n_ctx, "is_processing": task.is_some()});
    Ok(json_response(
        StatusCode::OK,
        &tasks.into_iter().enumerate().map(slot).collect(),
    ))
}

pub(super) async fn completion(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Body(mut fields, share): Body,
) -> Result<Response, ApiError> {
    let app = shared.app_with_room(&fields).await?;
    let prompts = prompts(&app, fields.need("prompt")?).await?;
    complete(app, caller, fields, share, prompts).await
}

/// Code between a text and another.
pub(super) async fn infill(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Body(mut fields, share): Body,
) -> Result<Response, ApiError> {
    let app = shared.app_with_room(&fields).await?;
    let extra: Vec<Value> = fields.take("input_extra")?.unwrap_or_default();
    let (prefix, suffix): (String, String) =
        (fields.need("input_prefix")?, fields.need("input_suffix")?);
    // What the missing text begins with.
    let begin: String = fields.take("prompt")?.unwrap_or_default();
    let tokens = around(&app, extra, prefix, begin, suffix).await?;
    complete(app, caller, fields, share, vec![tokens]).await
}

/// The tokens of a text with a gap, which `begin` begins to fill; before it other texts (`extra`),
/// with their names.
pub(super) async fn around(
    app: &App,
    extra: Vec<Value>,
    prefix: String,
    begin: String,
    suffix: String,
) -> Result<Vec<u32>, ApiError> {
    let Some(fim) = app.tokenizer.fill_in_the_middle() else {
        let message = "the model has no tokens for texts with a gap";
        return Err(ApiError::new(
            StatusCode::NOT_IMPLEMENTED,
            "not_supported_error",
            message,
        ));
    };
    let tokenizer = Arc::clone(&app.tokenizer);
    blocking(move || {
        let text = |text: &str| tokenizer.encode(text, false, false);
        let mut tokens: Vec<u32> = tokenizer
            .bos()
            .filter(|_| tokenizer.add_bos())
            .into_iter()
            .collect();
        if !extra.is_empty() {
            tokens.extend(fim.repository);
            tokens.extend(
                fim.repository
                    .map(|_| text("repository\n"))
                    .unwrap_or_default(),
            );
        }
        for (i, chunk) in extra.iter().enumerate() {
            let Some(content) = chunk["text"].as_str() else {
                return Err(ApiError::field(
                    &format!("input_extra[{i}]"),
                    "it has no text",
                ));
            };
            let name = chunk["filename"].as_str().unwrap_or("other");
            match fim.file {
                Some(file) => tokens.extend(
                    [file]
                        .into_iter()
                        .chain(text(&format!("{name}\n{content}"))),
                ),
                None => tokens.extend(text(&format!("\n\n--- {name} ---\n\n{content}"))),
            }
        }
        tokens.push(fim.prefix);
        tokens.extend(text(&format!("{prefix}{begin}")));
        tokens.push(fim.suffix);
        tokens.extend(text(&suffix));
        tokens.push(fim.middle);
        Ok(tokens)
    })
    .await
}

/// Answers to prompts, in the words of llama-server.
async fn complete(
    app: Arc<App>,
    caller: Caller,
    mut fields: Fields,
    share: Share,
    prompts: Vec<Vec<u32>>,
) -> Result<Response, ApiError> {
    let params = Params::of(&app, &mut fields)?;
    let format = Format::of(&mut fields)?;
    // 0 is none here.
    let logprobs = top_logprobs("n_probs", fields.take("n_probs")?)?.filter(|&n| n > 0);
    // Streams have them anyway.
    let with_tokens = fields.flag("return_tokens")? || params.stream;
    let wanted = fields.take("response_fields")?;
    // Those that would end an answer earlier, or tell other figures.
    for (name, value) in [
        ("n_indent", 0),
        ("t_max_prompt_ms", 0),
        ("t_max_predict_ms", 0),
    ] {
        fields.only(name, value)?;
    }
    fields.only("post_sampling_probs", false)?;
    fields.finish()?;
    if params.stream && prompts.len() * params.n != 1 {
        return Err(ApiError::field("stream", "of one answer alone"));
    }
    let (job, answers) = Job {
        app,
        caller,
        params,
        logprobs,
    }
    .submit(prompts, format, false)
    .await?;
    drop(share);
    let call = Call {
        job,
        with_tokens,
        wanted,
    };
    if call.job.params.stream {
        let begin = (call, answers.into_iter().next());
        let parts = stream::unfold(begin, |(call, answer)| async move {
            let mut answer = answer?;
            loop {
                match answer.next().await {
                    Some(Ok(Step { piece: None, .. })) => {}
                    Some(Ok(Step {
                        piece: Some(piece), ..
                    })) => {
                        let part = call.part(&answer, &[piece]);
                        break Some((event(&part), (call, Some(answer))));
                    }
                    Some(Err(error)) => break Some((event(&error.json()), (call, None))),
                    None => break Some((event(&call.end(&answer, &[])), (call, None))),
                }
            }
        });
        return Ok(events(parts.map(Ok)));
    }
    let whole = answers.into_iter().map(|mut answer| async {
        let mut pieces = Vec::new();
        while let Some(step) = answer.next().await {
            pieces.extend(step?.piece);
        }
        Ok::<_, ApiError>((pieces, answer))
    });
    let whole = try_join_all(whole).await?;
    let mut all: Vec<_> = whole
        .iter()
        .map(|(pieces, answer)| call.end(answer, pieces))
        .collect();
    let answer = if all.len() == 1 {
        all.remove(0)
    } else {
        all.into()
    };
    Ok(json_response(StatusCode::OK, &answer))
}

/// What the answers to a request for completion have in common.
struct Call {
    job: Job,
    with_tokens: bool,
    /// The fields of the end that are told; all if there is no list.
    wanted: Option<Vec<String>>,
}

impl Call {
    /// A stretch of an answer.
    fn part(&self, answer: &Answer, pieces: &[TokenText]) -> Value {
        let app = &self.job.app;
        let text: String = pieces.iter().map(|piece| &piece.text[..]).collect();
        let tokens = pieces
            .iter()
            .filter(|_| self.with_tokens)
            .map(|piece| piece.token);
        let mut part = json!({
            "index": answer.index, "content": text, "tokens": tokens.collect::<Vec<_>>(), "stop": false,
            "tokens_evaluated": answer.n_prompt,
        });
        if self.job.logprobs.is_some() {
            let of = |token, logprob| {
                let mut value = chat_logprob(app, token, logprob);
                value["id"] = token.into();
                value
            };
            let piece = |piece: &TokenText| {
                let mut value = of(piece.token, piece.logprob.unwrap_or(f32::NAN));
                value["top_logprobs"] = piece
                    .top_logprobs
                    .iter()
                    .map(|&(token, logprob)| of(token, logprob))
                    .collect();
                value
            };
            part["completion_probabilities"] = pieces.iter().map(piece).collect();
        }
        part
    }

    /// A whole answer, or its end.
    fn end(&self, answer: &Answer, pieces: &[TokenText]) -> Value {
        let mut end = self.part(answer, pieces);
        let Some(finish) = answer.finish() else {
            return end;
        };
        end["stop"] = true.into();
        end["model"] = self.job.app.name.clone().into();
        end["stop_type"] = match finish.reason {
            StopReason::EndOfGeneration => "eos",
            StopReason::StopString => "word",
            StopReason::MaxTokens | StopReason::ContextFull | StopReason::MaskLimit => "limit",
            _ => "none",
        }
        .into();
        end["stopping_word"] = finish.stop.map_or("", |i| &self.job.params.stop[i]).into();
        end["truncated"] = (finish.reason == StopReason::ContextFull).into();
        end["tokens_predicted"] = finish.n_generated.into();
        end["tokens_cached"] = finish.n_cached.total().into();
        end["timings"] = timings(&finish);
        match &self.wanted {
            None => end,
            Some(names) => selected(&end, names),
        }
    }
}

/// Fields by their paths, as in `timings/predicted_ms`: each under the last name of its path.
fn selected(value: &Value, paths: &[String]) -> Value {
    let found = paths.iter().filter_map(|path| {
        let field = path
            .split('/')
            .try_fold(value, |object, name| object.get(name))?;
        Some((path.rsplit('/').next()?.to_owned(), field.clone()))
    });
    Value::Object(found.collect())
}

pub(super) async fn metrics(State(shared): State<Shared>) -> Result<Response, ApiError> {
    let models = shared.models.all_loaded();
    let reads_folders =
        !shared.memories.is_empty() || models.iter().any(|app| !app.learners.is_empty());
    let text = move || {
        let models: Vec<_> = shared.models.list().into_iter().map(figures).collect();
        let metrics = shared.models.metrics();
        metrics
            .text(&models, shared.models.n_loads(), &shared.memories.figures())
            .map_err(|error| ApiError::internal(error.to_string()))
    };
    let text = match reads_folders {
        true => blocking(text).await?,
        false => text()?,
    };
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

/// What metrics tell of a model.
fn figures(of: Listed<'_>) -> OfModel {
    let name = of.entry.name().unwrap_or_default().to_owned();
    let Some(app) = of.app else {
        return OfModel {
            name,
            engine: None,
            state: of.state,
            adapted: Vec::new(),
            learning: Vec::new(),
            n_images: 0,
        };
    };
    let learners = app.learners.iter().enumerate();
    let learning = learners.map(|(tenant, learner)| {
        let (n_pending, n_dropped) = learner.sona.n_pending();
        let version = learner.sona.status().map_or(0, |status| status.version);
        let history = learner.sona.history();
        let judged = judged_of(&history, version).map(|event| event.judged);
        Learning {
            tenant,
            version,
            n_pending: n_pending as u64,
            n_dropped,
            is_failing: learner.sona.failure().is_some(),
            loss_change: judged.map_or(0.0, |(_, before, after)| after - before),
        }
    });
    OfModel {
        name,
        engine: Some(app.engine.clone()),
        state: of.state,
        adapted: app.adapted_names(),
        learning: learning.collect(),
        n_images: (app.images.as_ref()).map_or(0, |of| of.template.projector.n_encoded()),
    }
}
