//! `ruvllm quantize`: the same model in a smaller type.

use crate::bench::feedback::FeedbackText;
use crate::bench::target::Target;
use crate::flags::{OverwriteArg, RecipeArgs, ThreadsArg};
use crate::io::{Failure, count, note, parse_size, printable, read_text, size};
use crate::quantize::{Rows, file_type, plan};
use ruvllm::gguf::{Gguf, TensorInfo};
use ruvllm::model::quantize::{MomentsSource, NamedType, Recipe, writer};
use ruvllm::quant::FileType;
use std::path::PathBuf;
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  ruvllm quantize model-f16.gguf model-q4_k_m.gguf Q4_K_M
  ruvllm quantize model-q8_0.gguf small.gguf Q4_0 --allow-requantize
  ruvllm quantize model-f16.gguf model-q8_0.gguf Q8_0 --overwrite
  ruvllm imatrix -m model-f16.gguf -f text.txt -o imatrix.gguf
  ruvllm quantize model-f16.gguf small.gguf IQ2_M --imatrix imatrix.gguf
  ruvllm quantize model-f16.gguf small.gguf Q4_K_M --imatrix imatrix.gguf --feedback-text text.txt
  ruvllm quantize model-f16.gguf small.gguf Q4_K_M --tensor-type ffn_down=Q6_K
  ruvllm quantize model-f16.gguf small.gguf Q4_K_M --target-size 3.5G --target-text text.txt

The output appears under its name when it is complete. Start from F16, BF16 or F32 where you can:
quantising twice loses more than once. Types below 4 bits need an importance matrix to be good.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// GGUF file to read; of a split model any part, and the output is one file
    input: PathBuf,
    /// GGUF file to write
    output: PathBuf,
    /// Type to convert to
    #[arg(id = "quantize", value_name = "TYPE", value_parser = file_type)]
    file_type: FileType,
    /// Accept tensors that are quantised already
    #[arg(long)]
    allow_requantize: bool,
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Size of the file: measures how much each kind of tensor matters, and takes the types that lose
    /// least; TYPE is what the file says it is. Takes memory for the model as it is
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "target_text",
          conflicts_with_all = ["pure", "output_tensor_type", "token_embedding_type", "leave_output_tensor", "target_bpw"])]
    target_size: Option<u64>,
    /// The same by bits per weight
    #[arg(long, value_name = "BITS", requires = "target_text",
          conflicts_with_all = ["pure", "output_tensor_type", "token_embedding_type", "leave_output_tensor"])]
    target_bpw: Option<f64>,
    /// Text on which it is measured, of at least 1,024 tokens; the first 4,096 count
    #[arg(long, value_name = "FILE")]
    target_text: Option<PathBuf>,
    /// Write the types that were chosen as flags, one in a line
    #[arg(long, value_name = "FILE", requires = "target_text")]
    target_flags: Option<PathBuf>,
    /// Text on which later columns of a matrix learn to make up for what earlier ones err (GPTQ): a
    /// fourth to a half less divergence at the same size. Some ten thousand tokens are enough
    #[arg(long, value_name = "FILE")]
    feedback_text: Option<PathBuf>,
    #[command(flatten)]
    overwrite: OverwriteArg,
    #[command(flatten)]
    threads: ThreadsArg,
    /// Tell the type of each tensor
    #[arg(short, long)]
    verbose: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let start = Instant::now();
    let gguf = Gguf::open(&args.input)?;
    args.overwrite.check(&args.output)?;
    // No output yet is not the input.
    if same_file::is_same_file(&args.input, &args.output).unwrap_or(false) {
        return Err(Failure::Usage(format!(
            "{} is the input itself; write to another file",
            args.output.display()
        )));
    }
    if gguf.tensors().is_empty() {
        return Err(Failure::Work(format!(
            "{}: there are no tensors in it",
            args.input.display()
        )));
    }

    let mut recipe = args.recipe()?;
    if let Some(bytes) = args.target_bytes(&gguf)? {
        let mix = args.mix(&gguf, &recipe, bytes)?;
        recipe.named.extend(mix);
    }
    let plan = plan(&gguf, &recipe)?;
    let feedback = match &args.feedback_text {
        Some(path) => {
            let (text, n_threads) = (read_text(path)?, args.threads.number());
            Some(FeedbackText::new(&gguf, &plan, &text, n_threads)?)
        }
        None => None,
    };
    if args.verbose {
        for planned in &plan {
            let t = planned.tensor;
            let how = match planned.importance {
                _ if feedback.as_ref().is_some_and(|text| text.has(t)) => ", with feedback",
                Some(_) => ", by importance",
                None => "",
            };
            let (name, from, to) = (printable(&t.name), t.dtype.to_string(), planned.to);
            note(format!("{name:<40} {from:>8} -> {to}{how}"));
        }
    }
    let total = gguf.tensors().iter().map(TensorInfo::n_elems).sum();
    let rows = Rows::new("quantising", total, args.threads.number())?;
    let moments = feedback
        .as_ref()
        .map(|text| |t: &TensorInfo| text.moments(t, &rows));
    let moments = moments
        .as_ref()
        .map(|moments| moments as &MomentsSource<'_>);
    let mut writer = writer(&gguf, &plan, args.file_type, &rows.converter, moments);
    args.overwrite.apply(&mut writer);
    let written = writer.write(&args.output);
    rows.finish(written)?;
    let (before, after) = (
        gguf.file_size(),
        std::fs::metadata(&args.output)
            .map_err(Failure::file(&args.output))?
            .len(),
    );
    note(format!(
        "{}: {} parameters, {} -> {} ({:.2} bits per weight) in {:.1} s",
        args.output.display(),
        count(total),
        size(before),
        size(after),
        after as f64 * 8.0 / total as f64,
        start.elapsed().as_secs_f64()
    ));
    Ok(())
}

impl Args {
    /// Bytes that the file is to have, if that is said.
    fn target_bytes(&self, gguf: &Gguf) -> Result<Option<u64>, Failure> {
        let n: u64 = gguf.tensors().iter().map(TensorInfo::n_elems).sum();
        match self.target_bpw {
            Some(bits) if !(bits > 0.0 && bits <= 32.0) => Err(Failure::Usage(format!(
                "--target-bpw {bits}: expected more than 0 and at most 32"
            ))),
            Some(bits) => Ok(Some((bits / 8.0 * n as f64) as u64)),
            None => Ok(self.target_size),
        }
    }

    /// The types that lose least for so many bytes.
    fn mix(&self, gguf: &Gguf, recipe: &Recipe, bytes: u64) -> Result<Vec<NamedType>, Failure> {
        let Some(text) = &self.target_text else {
            return Err(Failure::Usage("--target-text FILE is needed".into()));
        };
        let mut scratch = self.output.clone().into_os_string();
        scratch.push(".logits");
        let target = Target {
            gguf,
            plan: &plan(gguf, recipe)?,
            named: &recipe.named,
            importance: recipe.importance.as_ref(),
            text: &read_text(text)?,
            bytes,
            scratch: scratch.into(),
            n_threads: self.threads.number(),
        };
        let mix = target.mix()?;
        let flag =
            |named: &NamedType| format!("--tensor-type '{}={}'\n", named.pattern(), named.dtype());
        let flags: String = mix.iter().map(flag).collect();
        match &self.target_flags {
            Some(path) => std::fs::write(path, flags).map_err(Failure::file(path))?,
            None => note(flags.trim_end()),
        }
        Ok(mix)
    }

    fn recipe(&self) -> Result<Recipe, Failure> {
        let mut recipe = self.recipe.recipe(self.file_type)?;
        recipe.allow_requantize = self.allow_requantize;
        Ok(recipe)
    }
}
