//! What patterns may take.

/// Most bytes of a pattern.
pub(super) const MAX_PATTERN: usize = 16 << 10;
/// Most bytes that are written to make patterns, for all tools of a request.
const MAX_WRITTEN: usize = 32 << 20;

/// What the grammars of a request may still take.
pub(in crate::serve::api::responses) struct Budget(usize);

impl Default for Budget {
    fn default() -> Budget {
        Budget(MAX_WRITTEN)
    }
}

impl Budget {
    pub(super) fn take(&mut self, n_bytes: usize) -> Result<(), String> {
        let left = self.0.checked_sub(n_bytes);
        self.0 = left.ok_or("the grammars of the tools are too large together")?;
        Ok(())
    }
}
