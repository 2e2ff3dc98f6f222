//! What is recorded of answers, and learnt by itself: for one user, or for each key by itself.

use crate::io::Failure;
use crate::serve::api::body::Body;
use crate::serve::http::error::ApiError;
use crate::serve::http::response::json_response;
use crate::serve::{App, Args, Caller, Shared, blocking};
use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use ruvllm::exec::{Engine, PooledStates};
use ruvllm::lora::Adapter;
use ruvllm::sona::{Background, Sona, Trajectory};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// A user, and what is learnt from their requests alone.
pub(crate) struct Learner {
    sona: Sona,
    /// Learns until it is dropped.
    _background: Background,
}

impl Learner {
    fn open(
        args: &Args,
        folder: &Path,
        tenant: &str,
        engine: &Engine,
    ) -> Result<Arc<Learner>, Failure> {
        let sona = args.sona.open(folder, tenant, engine)?;
        let background = sona.start()?;
        Ok(Arc::new(Learner {
            sona,
            _background: background,
        }))
    }

    /// One for each key, or one for all if there are no keys to tell users by.
    pub(crate) fn all(
        args: &Args,
        keys: &[String],
        engine: &Engine,
    ) -> Result<Vec<Arc<Learner>>, Failure> {
        let Some(folder) = &args.sona.sona else {
            return Ok(Vec::new());
        };
        match (args.learn_per_user, keys) {
            (false, [] | [_]) => Ok(vec![Learner::open(args, folder, "", engine)?]),
            (false, _) => {
                let why = "there are several keys, and what one user writes must not reach another";
                Err(Failure::Usage(format!(
                    "--sona: {why}: give --learn-per-user"
                )))
            }
            (true, []) => Err(Failure::Usage(
                "--learn-per-user: users are told apart by --api-key, and there is none".into(),
            )),
            (true, keys) => {
                let open = |key: &String| {
                    // The name stays when keys come or go, and does not tell the key.
                    let name: String = Sha256::digest(key)
                        .iter()
                        .take(16)
                        .map(|byte| format!("{byte:02x}"))
                        .collect();
                    Learner::open(args, &folder.join(&name), &name, engine)
                };
                keys.iter().map(open).collect()
            }
        }
    }

    /// What is in effect for a prompt.
    pub(crate) fn adapter(&self, prompt: &[u32]) -> Result<Option<Arc<Adapter>>, ApiError> {
        Ok(self.sona.adapter(prompt)?)
    }
}

impl App {
    /// Who learns from a caller's requests.
    pub(crate) fn learner(&self, caller: &Caller) -> Option<&Arc<Learner>> {
        self.learners.get(caller.tenant.parse().unwrap_or(0))
    }
}

/// A request whose answer is awaited to be recorded.
pub(crate) struct Recorder {
    learner: Arc<Learner>,
    begun: Instant,
    trajectory: Trajectory,
}

impl Recorder {
    /// For answer `i` to `prompt`.
    pub(crate) fn new(
        learner: &Arc<Learner>,
        caller: &Caller,
        user: Option<&str>,
        prompt: &[u32],
        i: usize,
    ) -> Recorder {
        let request_id = if i == 0 {
            caller.request.to_string()
        } else {
            format!("{}#{i}", caller.request)
        };
        let trajectory = Trajectory {
            session_id: user.unwrap_or(&caller.request).to_owned(),
            request_id,
            n_prompt: prompt.len(),
            tokens: prompt.to_vec(),
            ..Default::default()
        };
        Recorder {
            learner: Arc::clone(learner),
            begun: Instant::now(),
            trajectory,
        }
    }

    /// Another token of the answer.
    pub(crate) fn push(&mut self, token: u32) {
        self.trajectory.n_answer += 1;
        self.trajectory.tokens.push(token);
    }

    /// Records it; what fails is logged, as the answer is there.
    pub(crate) fn finish(self, pooled: PooledStates) {
        let Recorder {
            learner,
            begun,
            mut trajectory,
        } = self;
        trajectory.latency = begun.elapsed();
        (trajectory.query_embedding, trajectory.response_embedding) =
            (pooled.prompt, pooled.answer);
        tokio::task::spawn_blocking(move || {
            if let Err(error) = learner.sona.record(trajectory) {
                tracing::warn!(target: crate::serve::observe::log::HTTP, %error, "a request was not recorded");
            }
        });
    }
}

/// `POST /feedback`: rates the answer to a request of the same caller.
pub(crate) async fn feedback(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    let app = shared.app()?;
    let (request, score): (String, f32) = (fields.need("request_id")?, fields.need("score")?);
    fields.finish()?;
    let Some(learner) = app.learner(&caller).cloned() else {
        return Err(ApiError::wrong(
            "nothing is recorded here: the server was started without --sona",
        ));
    };
    blocking(move || {
        learner
            .sona
            .rate(&request, score)
            .map_err(|error| ApiError::wrong(error.to_string()))
    })
    .await?;
    Ok(json_response(StatusCode::OK, &json!({"recorded": true})))
}
