//! `ruvllm train`: a LoRA adapter from examples.

#[cfg(feature = "chat")]
use crate::flags::template::{Renderer, TemplateArgs, bos_text, eos_text};
use crate::flags::{ModelArgs, OverwriteArg, PlacementArgs, ThreadsArg, no_tokenizer};
use crate::io::plot::{Mark, Plot, Series};
use crate::io::{Failure, Progress, file_or_pipe, name, note, on_interrupt, print, read_text};
use ruvllm::Engine;
use ruvllm::Model;
use ruvllm::Tokenizer;
use ruvllm::engine::EngineOptions;
use ruvllm_learn::bench::Estimate;
use ruvllm_learn::sona::{FolderOptions, SonaFolder};
use ruvllm_learn::train::{Example, Loss, Schedule, TargetSet, TrainOptions, TrainReport, Trainer};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Examples:
  ruvllm train -m model.gguf -f examples.jsonl -o adapter.gguf
  ruvllm train -m model.gguf -f examples.jsonl --control manual.txt -o adapter.gguf --svg losses.svg
  ruvllm train -m model.gguf -f letters.txt --targets qv --rank 4 -o adapter.gguf
  ruvllm train -m model.gguf -f pairs.jsonl --loss dpo -o adapter.gguf
  ruvllm train -m model.gguf --learn mine -o adapter.gguf     what was recorded
  ruvllm generate -m model.gguf --lora adapter.gguf -p \"…\"

A .jsonl file has an example per line: {\"text\": …}, {\"prompt\": …, \"completion\": …} or {\"messages\": […]}, \
of which only completions, and answers of the assistant in the model's chat template, are learnt. Any other file is \
a text. With --loss dpo a line is {\"prompt\": …, \"chosen\": …, \"rejected\": …}, with --loss kto {\"prompt\": …, \
\"completion\": …, \"label\": true or false}; prompts and completions may be lists of messages. Control text is what \
the model must stay good at: half of it is replayed, half is measured on.
A training that was interrupted, or killed, continues when the same command is given again.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// What is minimised: sft, or the losses of preferences dpo and kto
    #[arg(long, value_name = "LOSS", default_value = "sft", value_parser = loss)]
    loss: Loss,
    /// Of dpo and kto: the larger, the less the model moves from what it was [default: 0.1]
    #[arg(long, value_name = "BETA")]
    beta: Option<f32>,
    /// Of kto: weight of desirable completions [default: 1]
    #[arg(long, value_name = "WEIGHT")]
    desirable_weight: Option<f32>,
    /// Of kto: weight of undesirable completions [default: 1]
    #[arg(long, value_name = "WEIGHT")]
    undesirable_weight: Option<f32>,
    /// Examples (.jsonl) or a text; - is a text from stdin
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Train on the requests of this folder that were recorded with their tokens (see `ruvllm
    /// learn`)
    #[arg(long, value_name = "DIR", conflicts_with = "file")]
    learn: Option<PathBuf>,
    /// Of requests that were rated only those with this rating or a better one are examples, with
    /// their answers
    #[arg(long, value_name = "RATING", default_value_t = 0.5, requires = "learn")]
    quality_threshold: f32,
    /// Text of the kind that must not be forgotten
    #[arg(long, value_name = "FILE")]
    control: Option<PathBuf>,
    /// Adapter file to write; FILE.checkpoint holds the state meanwhile
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    overwrite: OverwriteArg,
    /// Begin anew, even if there is a checkpoint
    #[arg(long)]
    restart: bool,
    /// Steps between two checkpoints
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    save_every: u32,
    /// Rank of the adapter
    #[arg(long, value_name = "R", default_value_t = TrainOptions::default().rank)]
    rank: usize,
    /// Strength: alpha/rank is the factor on what the adapter adds [default: the rank]
    #[arg(long, value_name = "ALPHA")]
    alpha: Option<f32>,
    /// Matrices to change: qv, qkvo, all, or names such as attn_q,ffn_down
    #[arg(long, value_name = "SET", default_value = "all", value_parser = targets)]
    targets: TargetSet,
    /// Learning rate of Adam
    #[arg(long, visible_alias = "lr", value_name = "RATE", default_value_t = TrainOptions::default().rate)]
    learning_rate: f32,
    /// How the rate changes: constant, cosine or one-cycle
    #[arg(long, value_name = "SCHEDULE", default_value = "cosine", value_parser = schedule)]
    schedule: Schedule,
    /// First steps, in which the rate rises
    #[arg(long, value_name = "N", default_value_t = TrainOptions::default().warmup)]
    warmup: usize,
    /// Decoupled weight decay, as a fraction of the rate
    #[arg(long, value_name = "PART", default_value_t = TrainOptions::default().weight_decay)]
    weight_decay: f32,
    /// How often every example is read
    #[arg(long, value_name = "N", default_value_t = TrainOptions::default().epochs)]
    epochs: f32,
    /// Examples whose gradients a step adds up
    #[arg(long, value_name = "N", default_value_t = TrainOptions::default().batch)]
    batch: usize,
    /// Largest norm of a step's gradient
    #[arg(long, value_name = "NORM", default_value_t = TrainOptions::default().clip)]
    clip: f32,
    /// Longest example in tokens; texts are cut [default: what the model was trained for, at most
    /// 2048]
    #[arg(
        short,
        long,
        value_name = "N",
        default_value_t = 0,
        hide_default_value = true
    )]
    ctx_size: usize,
    /// Fraction of the examples that is not trained on but tells when to stop
    #[arg(long, value_name = "PART", default_value_t = TrainOptions::default().held_out)]
    held_out: f32,
    /// Steps between two evaluations [default: once per epoch]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    eval_every: usize,
    /// Evaluations without a gain after which training ends; 0 is never
    #[arg(long, value_name = "N", default_value_t = TrainOptions::default().patience)]
    patience: usize,
    /// Most mean KL divergence on control text, in nats
    #[arg(long, value_name = "NATS", default_value_t = TrainOptions::default().max_divergence)]
    max_divergence: f64,
    /// Weight of elastic weight consolidation: values that control text depends on are held back
    #[arg(long, value_name = "LAMBDA", default_value_t = TrainOptions::default().ewc_lambda)]
    ewc_lambda: f32,
    /// Seed of the adapter's first values and of the order of the examples
    #[arg(short, long, value_name = "SEED", default_value_t = TrainOptions::default().seed)]
    seed: u64,
    /// JSON file for all steps and evaluations
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// File for a plot of the losses
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    placement: PlacementArgs,
    #[cfg(feature = "chat")]
    #[command(flatten)]
    template: TemplateArgs,
}

fn targets(text: &str) -> Result<TargetSet, String> {
    let named = TargetSet::NAMED
        .into_iter()
        .find(|(name, _)| *name == text)
        .map(|(_, set)| set);
    Ok(named.unwrap_or_else(|| TargetSet::Parts(text.split(',').map(str::to_owned).collect())))
}

fn schedule(text: &str) -> Result<Schedule, String> {
    named(&Schedule::ALL, text)
}

fn loss(text: &str) -> Result<Loss, String> {
    named(&Loss::ALL, text)
}

fn named<T: Copy>(all: &[(&str, T)], text: &str) -> Result<T, String> {
    let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
    let found = all.iter().find(|(name, _)| *name == text);
    found
        .map(|(_, value)| *value)
        .ok_or_else(|| format!("there are {}", names.join(", ")))
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    args.overwrite.check(&args.output)?;
    check_loss(args)?;
    let mut folder = args
        .learn
        .as_deref()
        .map(|path| SonaFolder::open(path, &FolderOptions::default()))
        .transpose()?;
    let text = match &folder {
        Some(_) => None,
        None => {
            let path = file_or_pipe(args.file.as_ref(), "-f FILE or --learn DIR")?;
            Some((read_text(&path)?, path))
        }
    };
    let control = args.control.as_deref().map(read_text).transpose()?;
    let model = args.model.open(&args.placement)?;
    let tokenizer = model.tokenizer().ok_or_else(|| no_tokenizer(&args.model))?;
    let n_ctx = if args.ctx_size == 0 {
        model.hparams().n_ctx_train.min(2048)
    } else {
        args.ctx_size
    };
    let examples = match (&text, &folder) {
        (Some((text, path)), _)
            if path
                .extension()
                .is_some_and(|extension| extension == "jsonl") =>
        {
            let reader = Reader::new(args, &model, tokenizer)?;
            reader
                .examples(text)
                .map_err(|message| Failure::Work(format!("{}: {message}", name(path))))?
        }
        (Some((text, _)), _) => {
            let tokens = tokenizer.encode(text, true, false);
            Example::pieces(&tokens, tokenizer.bos(), n_ctx.max(2))
        }
        (None, Some(folder)) => recorded(folder, args.loss, args.quality_threshold, n_ctx)?,
        (None, None) => Vec::new(),
    };
    let control = control
        .map(|text| tokenizer.encode(&text, true, false))
        .unwrap_or_default();
    let options = options(args);
    let n_threads = args.threads.number();
    let engine = Engine::new(
        &model,
        &EngineOptions {
            n_threads,
            ..Default::default()
        },
    )?;
    let mut trainer = Trainer::new(&engine, &examples, &control, &options)?;
    let checkpoint = PathBuf::from(format!("{}.checkpoint", args.output.display()));
    if checkpoint.exists() && !args.restart {
        trainer
            .resume(&checkpoint)
            .map_err(|error| Failure::Work(format!("{}: {error}", checkpoint.display())))?;
        note(format!(
            "continuing after step {} from {}",
            trainer.report().steps.len(),
            checkpoint.display()
        ));
    }
    let cancel = trainer.cancel_token();
    on_interrupt(move || cancel.cancel())?;
    let outcome = train(args, &mut trainer, &checkpoint);
    if outcome.is_err() {
        trainer.save(&checkpoint)?;
        note(format!(
            "the same command continues from {}",
            checkpoint.display()
        ));
    }
    outcome?;

    let report = trainer.report();
    tell(args, report)?;
    if report.kept == 0 {
        std::fs::remove_file(&checkpoint).map_err(Failure::file(&checkpoint))?;
        let why = "nothing was gained on the examples held out: no adapter is written";
        return Err(Failure::Work(format!(
            "{why}; try another rate, more examples, or a higher --max-divergence"
        )));
    }
    trainer.adapter().save(&args.output)?;
    std::fs::remove_file(&checkpoint).map_err(Failure::file(&checkpoint))?;
    note(format!("wrote {}", args.output.display()));
    Ok(folder.as_mut().map_or(Ok(()), SonaFolder::trained)?)
}

/// Refuses flags that the loss has no use for.
fn check_loss(args: &Args) -> Result<(), Failure> {
    let of_kto = [
        ("--desirable-weight", args.desirable_weight),
        ("--undesirable-weight", args.undesirable_weight),
    ];
    let given = [("--beta", args.beta.filter(|_| args.loss == Loss::Sft))].into_iter();
    let mut unused = given.chain(of_kto.into_iter().filter(|_| args.loss != Loss::Kto));
    if let Some((flag, _)) = unused.find(|(_, value)| value.is_some()) {
        return Err(Failure::Usage(format!(
            "{flag} has no meaning with --loss {}",
            args.loss.name()
        )));
    }
    if args.learn.is_some() && args.loss == Loss::Dpo {
        return Err(Failure::Usage(
            "--loss dpo needs pairs, which --learn does not record; --loss kto takes ratings"
                .into(),
        ));
    }
    Ok(())
}

fn options(args: &Args) -> TrainOptions {
    let default = TrainOptions::default();
    TrainOptions {
        loss: args.loss,
        beta: args.beta.unwrap_or(default.beta),
        desirable_weight: args.desirable_weight.unwrap_or(default.desirable_weight),
        undesirable_weight: args
            .undesirable_weight
            .unwrap_or(default.undesirable_weight),
        ewc_lambda: args.ewc_lambda,
        rank: args.rank,
        alpha: args.alpha,
        targets: args.targets.clone(),
        rate: args.learning_rate,
        schedule: args.schedule,
        warmup: args.warmup,
        weight_decay: args.weight_decay,
        epochs: args.epochs,
        batch: args.batch,
        clip: args.clip,
        n_ctx: args.ctx_size,
        held_out: args.held_out,
        eval_every: args.eval_every,
        patience: args.patience,
        max_divergence: args.max_divergence,
        seed: args.seed,
        betas: default.betas,
    }
}

/// Writes the reports that are asked for, and prints the table.
fn tell(args: &Args, report: &TrainReport) -> Result<(), Failure> {
    if let Some(path) = &args.report {
        std::fs::write(path, format!("{:#}\n", to_json(report, args.loss)))
            .map_err(Failure::file(path))?;
    }
    if let Some(path) = &args.svg {
        plot(report, args.loss).write(path)?;
    }
    print(table(report, args.loss))
}

/// The requests of a folder as examples; of those that are longer than the context, its end. For
/// KTO those that were rated: answers rated `threshold` or better are desirable.
fn recorded(
    folder: &SonaFolder,
    loss: Loss,
    threshold: f32,
    n_ctx: usize,
) -> Result<Vec<Example>, Failure> {
    let mut examples = Vec::new();
    folder.trajectories(|request| {
        let lesson = match (loss, request.quality_score) {
            (Loss::Sft, _) => request.lesson(threshold),
            (_, Some(_)) => request.n_prompt.min(request.tokens.len())..request.tokens.len(),
            (_, None) => 0..0,
        };
        let mut tokens = request.tokens;
        tokens.truncate(lesson.end);
        let begin = tokens.len().saturating_sub(n_ctx);
        let learnt: Vec<bool> = (begin..tokens.len())
            .map(|i| i > begin && lesson.contains(&i))
            .collect();
        if learnt.contains(&true) {
            let example = Example::new(tokens.split_off(begin), learnt);
            examples.push(match request.quality_score {
                Some(score) if loss == Loss::Kto => Example::labelled(example, score >= threshold),
                _ => example,
            });
        }
    })?;
    if examples.is_empty() {
        let path = folder.path().display();
        let which = if loss == Loss::Kto {
            "rated and recorded"
        } else {
            "recorded"
        };
        let why = format!(
            "no request was {which} with tokens that are to be learnt: a server stores them with --learn-text"
        );
        return Err(Failure::Work(format!("{path}: {why}")));
    }
    Ok(examples)
}

/// Tells what a training will do, begins it, and trains to the end.
fn train(args: &Args, trainer: &mut Trainer, checkpoint: &Path) -> Result<(), Failure> {
    let plan = trainer.plan();
    note(format!(
        "plan: steps of about {1} tokens: {0}; evaluations of at least {3}: {2}",
        plan.n_steps, plan.step_tokens, plan.n_evaluations, plan.evaluation_tokens
    ));
    let left_out = trainer.report().n_control_left_out;
    if left_out > 0 {
        note(format!(
            "control text: {left_out} tokens are left out; windows at equal distances are read"
        ));
    }
    let start = Instant::now();
    let mut told = trainer.report().evaluations.len();
    if told == 0 {
        trainer.begin()?;
        let all = plan.n_tokens() as f64 / plan.evaluation_tokens.max(1) as f64;
        tell_new(args, trainer.report(), &mut told, None);
        note(format!(
            "training takes about {}",
            rough(start.elapsed().mul_f64(all))
        ));
    }
    let (start, bar) = (
        Instant::now(),
        Progress::new("training", trainer.report().n_steps as u64),
    );
    loop {
        let step = trainer.step()?;
        let left = trainer.plan().n_tokens() as f64;
        let done = plan.n_tokens() as f64 - left;
        let left = (done > 0.0).then(|| start.elapsed().mul_f64(left / done));
        tell_new(args, trainer.report(), &mut told, left);
        bar.set(trainer.report().steps.len() as u64);
        let Some(step) = step else { break };
        if step.step.is_multiple_of(args.save_every as usize) {
            trainer.save(checkpoint)?;
        }
    }
    Ok(trainer.save(checkpoint)?)
}

/// Strength below which control text leaves an adapter little room.
const LITTLE_ROOM: f32 = 0.3;

/// Tells about the evaluations that were not told about yet, and the time that is left.
fn tell_new(args: &Args, report: &TrainReport, told: &mut usize, left: Option<Duration>) {
    for evaluation in &report.evaluations[*told..] {
        let mut line = format!(
            "step {}: {:.4} {} held out",
            evaluation.step,
            evaluation.held_out,
            unit(args.loss)
        );
        if !report.control_tokens.is_empty() {
            let _ = write!(
                line,
                "; control text: divergence {:.5} of {} at strength {:.3}",
                evaluation.divergence, args.max_divergence, evaluation.scale
            );
        }
        if let Some(left) = left.filter(|left| left.as_secs() > 0) {
            let _ = write!(line, "; about {} left", rough(left));
        }
        note(line);
        let first_trained = report.evaluations[..*told]
            .iter()
            .all(|before| before.step == 0);
        if evaluation.step > 0 && first_trained && evaluation.scale < LITTLE_ROOM {
            note(format!(
                "the bound on control text leaves the adapter little room (strength {:.3}): steps become shorter; \
                 with --max-divergence {} it would have about all",
                evaluation.scale,
                room(args.max_divergence, evaluation.scale)
            ));
        }
    }
    *told = report.evaluations.len();
}

/// The bound that an adapter would need at full strength: the divergence grows with its square.
fn room(max_divergence: f64, scale: f32) -> String {
    let scale = f64::from(scale).max(1e-3);
    format!(
        "{:.2}",
        (max_divergence / (scale * scale)).clamp(0.01, 10.0)
    )
}

/// A time in its largest unit.
fn rough(time: Duration) -> String {
    match time.as_secs() {
        0..90 => format!("{} s", time.as_secs().max(1)),
        90..5400 => format!("{} min", (time.as_secs() + 30) / 60),
        seconds => format!("{:.1} h", seconds as f64 / 3600.0),
    }
}

/// Turns lines of JSON into examples.
struct Reader<'a> {
    tokenizer: &'a Tokenizer,
    loss: Loss,
    #[cfg(feature = "chat")]
    template: Option<Renderer>,
}

impl<'a> Reader<'a> {
    #[cfg(feature = "chat")]
    fn new(args: &Args, model: &Model, tokenizer: &'a Tokenizer) -> Result<Reader<'a>, Failure> {
        let given = args.template.given()?;
        let source = given.as_deref().or_else(|| model.chat_template());
        let template = source.map(Renderer::new).transpose()?;
        Ok(Reader {
            tokenizer,
            loss: args.loss,
            template,
        })
    }

    #[cfg(not(feature = "chat"))]
    fn new(args: &Args, _: &Model, tokenizer: &'a Tokenizer) -> Result<Reader<'a>, Failure> {
        Ok(Reader {
            tokenizer,
            loss: args.loss,
        })
    }

    /// The examples of a file, or what is wrong with it.
    fn examples(&self, text: &str) -> Result<Vec<Example>, String> {
        let lines = text
            .lines()
            .enumerate()
            .filter(|(_, line)| !line.trim().is_empty());
        let example = |(i, line): (usize, &str)| {
            let value = serde_json::from_str(line).map_err(|error| error.to_string());
            value
                .and_then(|value| self.example(&value))
                .map_err(|message| format!("line {}: {message}", i + 1))
        };
        lines.map(example).collect()
    }

    fn example(&self, value: &Value) -> Result<Example, String> {
        let object = value.as_object().ok_or("not an object")?;
        let expected = match self.loss {
            Loss::Sft => "expected `text`, or `prompt` and `completion`, or `messages`",
            Loss::Dpo => "expected `prompt`, `chosen` and `rejected`",
            Loss::Kto => "expected `prompt`, `completion` and `label`",
        };
        let mut keys: Vec<&str> = object.keys().map(String::as_str).collect();
        keys.sort_unstable();
        match (self.loss, &keys[..]) {
            (Loss::Sft, ["text"]) => Ok(Example::text(&self.tokenizer.encode(
                string(object, "text")?,
                true,
                false,
            ))),
            (Loss::Sft, ["completion", "prompt"]) => self.completion(object, "completion"),
            (Loss::Sft, ["messages"]) => self.conversation(array(object, "messages")?, 0),
            (Loss::Dpo, ["chosen", "prompt", "rejected"]) => Ok(Example::preference(
                self.completion(object, "chosen")?,
                self.completion(object, "rejected")?,
            )),
            (Loss::Kto, ["completion", "label", "prompt"]) => {
                let label = object["label"]
                    .as_bool()
                    .ok_or("`label` is not true or false")?;
                Ok(Example::labelled(
                    self.completion(object, "completion")?,
                    label,
                ))
            }
            _ => Err(format!("has the keys {}; {expected}", keys.join(", "))),
        }
    }

    /// `prompt` and a completion of it, which is learnt: texts, or lists of messages.
    fn completion(&self, object: &Map<String, Value>, key: &str) -> Result<Example, String> {
        if object["prompt"].is_array() {
            let (prompt, completion) = (array(object, "prompt")?, array(object, key)?);
            return self.conversation(&[prompt, completion].concat(), prompt.len());
        }
        let prompt = self.tokenizer.encode_prompt(string(object, "prompt")?);
        let completion = string(object, key)?;
        let mut learnt = match prompt.last() {
            Some(&last) => self.tokenizer.encode_continuation(completion, last),
            None => self.tokenizer.encode(completion, false, true),
        };
        learnt.extend(self.tokenizer.eos());
        Ok(Example::completion(&prompt, &learnt))
    }

    #[cfg(not(feature = "chat"))]
    fn conversation(&self, _: &[Value], _: usize) -> Result<Example, String> {
        Err("messages need a build with the feature `chat`".into())
    }

    /// A conversation in the chat template; the answers of the assistant from message `first` on
    /// are learnt.
    #[cfg(feature = "chat")]
    fn conversation(&self, messages: &[Value], first: usize) -> Result<Example, String> {
        use ruvllm::chat::ChatInputs;
        let template = self
            .template
            .as_ref()
            .ok_or("the model has no chat template; give one with --chat-template NAME or --chat-template-file FILE")?;
        let render = |n: usize, add_generation_prompt: bool| {
            let inputs = ChatInputs {
                messages: Value::Array(messages[..n].to_vec()),
                add_generation_prompt,
                bos_token: bos_text(Some(self.tokenizer)),
                eos_token: eos_text(Some(self.tokenizer)),
                ..ChatInputs::new(&[])
            };
            let rendered = template.render(&inputs);
            rendered
                .map(|of| of.text)
                .map_err(|error| error.to_string())
        };
        let (mut text, mut tokens, mut learnt) = (String::new(), Vec::new(), Vec::new());
        let answers = messages
            .iter()
            .enumerate()
            .skip(first)
            .filter(|(_, message)| message["role"] == "assistant");
        for (i, message) in answers {
            for (until, is_learnt) in [(render(i, true)?, false), (render(i + 1, false)?, true)] {
                let whose = || format!("message {} ({message:.60})", i + 1);
                let new = until.strip_prefix(&text).ok_or_else(|| {
                    format!(
                        "{}: the chat template renders what comes before it differently with it",
                        whose()
                    )
                })?;
                let ids = match tokens.last() {
                    None => self.tokenizer.encode_prompt(new),
                    Some(&last) => self.tokenizer.encode_continuation(new, last),
                };
                learnt.extend(ids.iter().map(|_| is_learnt));
                tokens.extend(ids);
                text = until;
            }
        }
        if tokens.is_empty() {
            Err("no message of the role `assistant`".into())
        } else {
            Ok(Example::new(tokens, learnt))
        }
    }
}

fn array<'v>(object: &'v Map<String, Value>, key: &str) -> Result<&'v [Value], String> {
    object[key]
        .as_array()
        .map(Vec::as_slice)
        .ok_or_else(|| format!("`{key}` is not an array"))
}

fn string<'v>(object: &'v Map<String, Value>, key: &str) -> Result<&'v str, String> {
    object[key]
        .as_str()
        .ok_or_else(|| format!("`{key}` is not a string"))
}

/// Change of the loss, with an interval from a bootstrap over examples or windows.
fn change(after: &[f64], before: &[f64], sizes: &[usize]) -> Estimate {
    let sums: Vec<f64> = after.iter().zip(before).map(|(x, y)| x - y).collect();
    Estimate::of_ratio(&sums, sizes)
}

fn unit(loss: Loss) -> &'static str {
    match loss {
        Loss::Sft => "nats/token",
        Loss::Dpo => "nats/pair",
        Loss::Kto => "per completion",
    }
}

fn table(report: &TrainReport, loss: Loss) -> String {
    let (first, best) = (&report.evaluations[0], report.best());
    let mut out = String::new();
    let zeros = vec![0.0; best.rises.len()];
    if !report.held_out_tokens.is_empty() {
        let Estimate { value, low, high } =
            change(&best.losses, &first.losses, &report.held_out_tokens);
        let percent = |x: f64| 100.0 * x / first.held_out;
        let _ = writeln!(
            out,
            "held out: {:.4} {} before, {:.4} after step {}: {:+.1} % ({:+.1} to {:+.1})",
            first.held_out,
            unit(loss),
            best.held_out,
            best.step,
            percent(value),
            percent(low),
            percent(high)
        );
    }
    if loss != Loss::Sft && !best.losses.is_empty() {
        let better = best
            .losses
            .iter()
            .zip(&first.losses)
            .filter(|(after, before)| after < before)
            .count();
        let _ = writeln!(
            out,
            "in the direction asked for: {better} of {} held out",
            best.losses.len()
        );
    }
    if !report.control_tokens.is_empty() {
        let Estimate { value, low, high } = change(&best.rises, &zeros, &report.control_tokens);
        let percent = |x: f64| 100.0 * x.exp_m1();
        let _ = writeln!(
            out,
            "control text: perplexity {:+.2} % ({:+.2} to {:+.2}), divergence {:.5} nats/token, at strength {:.3}",
            percent(value),
            percent(low),
            percent(high),
            best.divergence,
            best.scale
        );
    }
    out
}

fn to_json(report: &TrainReport, loss: Loss) -> Value {
    let finite = |x: f64| if x.is_finite() { json!(x) } else { Value::Null };
    let interval = |e: Estimate| json!({ "value": e.value, "low": e.low, "high": e.high });
    let steps = report.steps.iter();
    let steps = steps.map(
        |s| json!({ "step": s.step, "loss": s.loss, "rate": s.rate, "gradient_norm": s.norm }),
    );
    let zeros = vec![0.0; report.control_tokens.len()];
    let first = &report.evaluations[0];
    let evaluations = report.evaluations.iter().map(|e| {
        json!({
            "step": e.step,
            "held_out": finite(e.held_out),
            "held_out_change": interval(change(&e.losses, &first.losses, &report.held_out_tokens)),
            "control_change": interval(change(&e.rises, &zeros, &report.control_tokens)),
            "divergence": e.divergence,
            "strength": e.scale,
        })
    });
    json!({
        "loss": loss.name(),
        "unit": unit(loss),
        "n_steps": report.n_steps,
        "n_trained": report.n_trained,
        "n_held_out": report.held_out_tokens.len(),
        "kept": report.kept,
        "steps": steps.collect::<Vec<_>>(),
        "evaluations": evaluations.collect::<Vec<_>>(),
    })
}

/// Losses by step: of the batches as a line, of the examples held out as dots.
fn plot(report: &TrainReport, loss: Loss) -> Plot {
    let best = report.best();
    let held_out = report
        .evaluations
        .iter()
        .map(|e| (e.step as f64, e.held_out));
    let series = |name: &str, mark, points| Series {
        name: name.into(),
        mark,
        points,
        labels: Vec::new(),
    };
    let training = report.steps.iter().map(|s| (s.step as f64, s.loss));
    let mut all = vec![series("training", Mark::Line, training.collect())];
    if best.held_out.is_finite() {
        all.push(series("held out", Mark::Dots, held_out.collect()));
        all.push(series(
            "kept",
            Mark::Rings,
            vec![(best.step as f64, best.held_out)],
        ));
    }
    Plot {
        title: "losses of the training".into(),
        x_label: "step".into(),
        y_label: unit(loss).into(),
        is_log: false,
        series: all,
    }
}
