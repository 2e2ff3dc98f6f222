//! The flag that lets an output be replaced.

use crate::io::{Failure, check_overwrite};
use ruvllm::gguf::Writer;
use std::path::Path;

/// What happens to an output that exists.
#[derive(clap::Args)]
pub(crate) struct OverwriteArg {
    /// Replace the output if it exists
    #[arg(long, alias = "force")]
    overwrite: bool,
}

impl OverwriteArg {
    /// Refuses, before any work, to replace a file that is not to be replaced.
    pub(crate) fn check(&self, output: &Path) -> Result<(), Failure> {
        check_overwrite(output, self.overwrite)
    }

    /// Whether the output may be replaced.
    #[cfg(feature = "convert")]
    pub(crate) fn is_given(&self) -> bool {
        self.overwrite
    }

    /// Lets the file be replaced, if the user said so.
    pub(crate) fn apply(&self, writer: &mut Writer<'_>) {
        if self.overwrite {
            writer.overwrite();
        }
    }
}
