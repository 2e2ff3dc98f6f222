//! Reuse of the keys and values of ended sequences: which sequences do it, and what must be equal.

use crate::arch::ARITHMETIC_VERSION;
use crate::compute::hook::TokenKind;
use crate::engine::SessionError;
use crate::engine::identity::identity;
use crate::engine::options::{CacheMode, CachedTokens, Reuse};
use crate::engine::sequence::Sequence;
use crate::kv::{CachedToken, PrefixKey};

impl Sequence {
    /// Begins this sequence, if it is empty, with as many of `tokens` as the engine's prefix cache
    /// has: at most all but the last, so that there are logits to compute. Returns how many;
    /// the next pass continues after them.
    ///
    /// A sequence with a [hook](crate::compute::OutputHook), which must see every token, reuses
    /// nothing. Its images, whose places are among these tokens, are known already.
    ///
    /// # Errors
    /// If there is no memory for the tokens.
    pub fn reuse(&mut self, tokens: &[u32]) -> Result<CachedTokens, SessionError> {
        self.cached = CachedTokens::default();
        if self.position() > 0 {
            return Ok(self.cached);
        }
        let mut cached = CachedTokens::default();
        let n = tokens.len().saturating_sub(1).min(self.n_ctx());
        if self.prefix.cache == CacheMode::Off || self.hook.is_some() || n == 0 {
            return Ok(cached);
        }
        self.reserve(n)?;
        let wanted: Vec<_> = tokens[..n]
            .iter()
            .enumerate()
            .map(|(i, &token)| self.cache_entry(i, token, TokenKind::Prompt))
            .collect();
        let (key, any, least) = (
            self.prefix_key(),
            self.prefix.reuse == Reuse::Any,
            self.prefix.min_cache_tokens,
        );
        let mut found = self.kv.reuse(&key, &wanted, least, any);
        if self.kv.uses_folder() {
            found.extend_from_slice(&wanted[found.len()..]);
            found.truncate(self.kv.load_files(&self.folder_key(), &found));
            if found.len() < least {
                self.kv.truncate(0);
                found.clear();
            }
        }
        found.truncate(self.whole());
        for CachedToken {
            token, generated, ..
        } in found
        {
            cached.prompt += usize::from(!generated);
            cached.generated += usize::from(generated);
            self.push(
                &[token],
                if generated {
                    TokenKind::Generated
                } else {
                    TokenKind::Prompt
                },
            );
        }
        self.cached = cached;
        Ok(cached)
    }

    /// Drops the keys and values of a part of an image whose tokens see each other, which are computed
    /// together; returns how many positions are left.
    fn whole(&mut self) -> usize {
        let mut n = self.kv.len();
        while let Some(start) = self.spans.uncut_start(n) {
            n = self.kv.truncate(start);
        }
        n
    }

    /// Releases the pages of this sequence, to the prefix cache if that is on; the tokens stay. The
    /// next pass restores them, or recomputes what is no longer cached.
    pub fn unload(&mut self) {
        self.store();
        self.kv.truncate(0);
    }

    /// Leaves the keys and values of the first `n` tokens to the prefix cache, if that is on, and
    /// goes on with them.
    ///
    /// # Errors
    /// If there is no memory for a copy of its tokens.
    pub(crate) fn share(&self, n: usize) -> Result<(), SessionError> {
        // A fork stores itself when it is dropped; it has no part of an image.
        self.fork()?.truncate(self.spans.whole_until(n));
        Ok(())
    }

    /// Restores what [`Sequence::unload`] released.
    pub(crate) fn reload(&mut self) {
        if self.prefix.cache != CacheMode::Off && self.kv.len() == 0 {
            let wanted = self.cache_entries(self.position());
            self.kv.reuse(&self.prefix_key(), &wanted, 0, false);
        }
    }

    /// Begins this sequence, which is empty, with the cached part of tokens that were computed
    /// before, each as its own kind.
    pub(crate) fn recall(
        &mut self,
        tokens: &[u32],
        kinds: &[TokenKind],
    ) -> Result<(), SessionError> {
        if self.prefix.cache != CacheMode::Off {
            self.reserve(kinds.len())?;
            tokens
                .iter()
                .zip(kinds)
                .for_each(|(&token, &kind)| self.push(&[token], kind));
            self.reload();
            let n = self.whole();
            // Images of tokens to come stay.
            let spans = self.spans.clone();
            self.truncate(n);
            self.spans = spans;
        }
        Ok(())
    }

    /// Leaves its keys and values to the prefix cache, if that is on.
    fn store(&mut self) {
        self.drop_drafts();
        let n = self.kv.len();
        // Keys that were turned are not those of its tokens.
        if self.n_dropped > 0 {
            return;
        }
        if self.prefix.cache == CacheMode::On && n > 0 && n >= self.prefix.min_cache_tokens {
            let tokens = self.cache_entries(n);
            if self.kv.uses_folder() {
                self.kv.save_files(&self.folder_key(), &tokens);
            }
            self.kv.store(self.prefix_key(), tokens);
        }
    }

    /// The first `n` tokens in the form of the cache.
    fn cache_entries(&self, n: usize) -> Vec<CachedToken> {
        self.tokens()[..n]
            .iter()
            .zip(self.kinds())
            .enumerate()
            .map(|(i, (&token, &kind))| self.cache_entry(i, token, kind))
            .collect()
    }

    fn cache_entry(&self, position: usize, token: u32, kind: TokenKind) -> CachedToken {
        CachedToken {
            token,
            generated: kind == TokenKind::Generated && !self.exact,
            image: self.spans.key(position),
        }
    }

    /// Everything on which bits depend, in a form that outlives the process, and the salt.
    fn folder_key(&self) -> String {
        let salt = ("salt", "", self.prefix.salt.clone());
        let lines = identity(self)
            .into_iter()
            .chain([salt])
            .map(|(key, _, value)| format!("{key}={value}\n"));
        lines.collect()
    }

    fn prefix_key(&self) -> PrefixKey {
        PrefixKey {
            model: self.model().fingerprint(),
            device: self.device.clone(),
            arithmetic: ARITHMETIC_VERSION,
            adapters: self.adapter_generation(),
            policy: self.kv.policy(),
            ropes: self.rope.fingerprint(),
            exact: self.exact,
            salt: self.prefix.salt.clone(),
        }
    }
}

impl Drop for Sequence {
    /// Stores its keys and values in the prefix cache, if that is on.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.store();
        }
    }
}
