//! What is learnt by itself from requests: for one user, or for each key by itself.

use super::args::ServerArgs;
use super::auth::name_of;
use super::http::error::ApiError;
use crate::io::Failure;
use ruvllm::Engine;
use ruvllm::lora::Adapter;
use ruvllm_learn::sona::{Background, Sona};
use std::path::Path;
use std::sync::Arc;

/// A user, and what is learnt from their requests alone.
pub(super) struct Learner {
    pub(super) sona: Sona,
    /// Learns until it is dropped.
    _background: Background,
}

impl Learner {
    fn open(
        args: &ServerArgs,
        folder: &Path,
        tenant: &str,
        engine: &Engine,
    ) -> Result<Arc<Learner>, Failure> {
        let sona = args.learn.open(folder, tenant, engine)?;
        let background = sona.start()?;
        Ok(Arc::new(Learner {
            sona,
            _background: background,
        }))
    }

    /// One for each key, or one for all if there are no keys to tell users by.
    pub(super) fn all(
        args: &ServerArgs,
        keys: &[String],
        engine: &Engine,
    ) -> Result<Vec<Arc<Learner>>, Failure> {
        let Some(folder) = &args.learn.folder else {
            return Ok(Vec::new());
        };
        match (args.learn_per_user, keys) {
            (false, [] | [_]) => Ok(vec![Learner::open(args, folder, "", engine)?]),
            (false, _) => {
                let why = "there are several keys, and what one user writes must not reach another";
                Err(Failure::Usage(format!(
                    "--learn: {why}: give --learn-per-user"
                )))
            }
            (true, []) => Err(Failure::Usage(
                "--learn-per-user: users are told apart by --api-key, and there is none".into(),
            )),
            (true, keys) => {
                let open = |key: &String| {
                    let name = name_of(key);
                    Learner::open(args, &folder.join(&name), &name, engine)
                };
                keys.iter().map(open).collect()
            }
        }
    }

    /// What is in effect for a prompt.
    pub(super) fn adapter(&self, prompt: &[u32]) -> Result<Option<Arc<Adapter>>, ApiError> {
        Ok(self.sona.adapter(prompt)?)
    }
}
