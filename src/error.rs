//! The sum of the errors of all modules. Messages are complete, and `source()` repeats nothing.

#[cfg(feature = "chat")]
use crate::chat::ChatError;
use crate::decode::DecodeError;
use crate::engine::SessionError;
use crate::gguf::GgufError;
#[cfg(feature = "grammar")]
use crate::grammar::GrammarError;
#[cfg(feature = "hub")]
use crate::hub::HubError;
use crate::lora::AdapterError;
use crate::model::ModelError;
use crate::quant::QuantError;
use crate::sample::SampleError;
use crate::scheduler::ScheduleError;
#[cfg(feature = "vision")]
use crate::session::PartsError;
use crate::session::{GradientError, StateError};
use crate::tokenizer::TokenizerError;
#[cfg(feature = "vision")]
use crate::vision::VisionError;

/// Shorthand for results of the whole crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any failure of the crate; wraps the error of the layer it came from.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Values could not be converted from or to a storage format.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// The file is not a readable GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The file is valid, but its vocabulary is not.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The file is valid, but does not describe a model this build can run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A session could not do what was asked.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// A request to a scheduler was refused, or lost.
    #[error(transparent)]
    Schedule(ScheduleError),
    /// An adapter was refused.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// The sampling parameters are invalid.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// A saved session was refused.
    #[error(transparent)]
    State(#[from] StateError),
    /// A grammar was refused.
    #[cfg(feature = "grammar")]
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// An image or a projector was refused.
    #[cfg(feature = "vision")]
    #[error(transparent)]
    Vision(#[from] VisionError),
    /// A prompt with images was refused.
    #[cfg(feature = "vision")]
    #[error(transparent)]
    Parts(PartsError),
    /// A model of the hub could not be had.
    #[cfg(feature = "hub")]
    #[error(transparent)]
    Hub(HubError),
    /// A chat template failed.
    #[cfg(feature = "chat")]
    #[error(transparent)]
    Chat(#[from] ChatError),
}

/// Errors made of those of lower modules: such a one stays what it is, wherever it comes through.
macro_rules! spread {
    ($($error:ident { $($variant:ident),* } $(else $own:ident)?;)*) => {$(
        impl From<$error> for Error {
            fn from(error: $error) -> Error {
                match error {
                    $($error::$variant(error) => error.into(),)*
                    $(error => Error::$own(error),)?
                }
            }
        }
    )*};
}

spread! {
    DecodeError { Session, Sample, Tokenizer };
    GradientError { Session, Adapter };
    ScheduleError { Session, Adapter, Sample, Tokenizer } else Schedule;
}

#[cfg(feature = "hub")]
spread! {
    HubError { Model } else Hub;
}

#[cfg(feature = "vision")]
spread! {
    PartsError { Session, Vision } else Parts;
}
