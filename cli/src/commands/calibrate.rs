//! `ruvllm calibrate`: tells a learner what it must not forget.

use crate::flags::{Folder, ModelArgs, ResidenceArgs, SessionArgs, no_tokenizer, session};
use crate::io::{Failure, file_or_pipe, note, read_text};
use ruvllm::kv::KvType;
use ruvllm_learn::Learning;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  ruvllm calibrate -m model.gguf -f manual.txt -o learned
  ruvllm -m model.gguf --learn learned -p \"…\"        then learns within the bound

Reads text of the kind that the model is to stay good at, some thousand tokens of it. Calibrating a \
folder again adds to what is known; what was learnt stays.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    residence: ResidenceArgs,
    /// Control text; - is stdin
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Folder of what is learnt, as --learn takes it
    #[arg(short, long, value_name = "DIR", default_value = "learned")]
    output: PathBuf,
    #[command(flatten)]
    session: SessionArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let text = read_text(&file_or_pipe(args.file.as_ref(), "-f FILE")?)?;
    let options = args.session.options(None, KvType::default());
    let model = args.model.open(&args.residence)?;
    let tokenizer = model.tokenizer().ok_or_else(|| no_tokenizer(&args.model))?;
    let mut session = session(&model, &args.session, &options, options.n_batch)?;
    let (folder, learner) = Folder::open(&args.output, &model)?;
    session.set_learner(learner)?;
    let tokens = tokenizer.encode(&text, true, false);
    session.calibrate(&tokens)?;
    if let Some(learner) = session.learner() {
        learner.save(&folder.file)?;
        let n = learner.n_control();
        note(format!(
            "{}: {n} moments of {} tokens of control text",
            folder.file.display(),
            tokens.len()
        ));
    }
    Ok(())
}
