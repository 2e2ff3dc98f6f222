//! The models that a benchmark takes, files or shapes, and how they run.

use super::lists::list;
use crate::flags::{CacheTypeArgs, MAX_THREADS, PlacementArgs, open};
use crate::io::Failure;
use crate::io::table::Format;
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::SessionOptions;
use ruvllm::engine::default_threads;
use ruvllm::gguf::Gguf;
use ruvllm::quant::FileType;
use ruvllm_benches::Shape;
use std::path::PathBuf;

/// What the rows of a plot have in common: their names do without it, its title has it.
pub(super) struct Common {
    model: Option<String>,
    n_threads: Option<usize>,
}

impl Common {
    /// Of rows with a model's name and a number of threads.
    pub(super) fn of<'r>(rows: impl Iterator<Item = (&'r str, usize)>) -> Common {
        let (models, numbers): (Vec<&str>, Vec<usize>) = rows.unzip();
        fn one<T: PartialEq + Copy>(all: &[T]) -> Option<T> {
            let first = all.first().copied()?;
            all.iter().all(|other| *other == first).then_some(first)
        }
        Common {
            model: one(&models).map(str::to_owned),
            n_threads: one(&numbers),
        }
    }

    /// Name of a row that measures `what`.
    pub(super) fn name(&self, (model, n_threads): (&str, usize), what: &str) -> String {
        let mut name = what.to_owned();
        if self.n_threads.is_none() {
            name += &format!(", {n_threads} threads");
        }
        if self.model.is_none() {
            name = format!("{model} {name}");
        }
        name
    }

    /// Title of a plot, `None` if the rows have several models.
    pub(super) fn title(&self) -> Option<String> {
        let model = self.model.as_ref()?;
        Some(match self.n_threads {
            Some(n_threads) => format!("{model}, {n_threads} threads"),
            None => model.clone(),
        })
    }
}

/// Which models, on how many threads, how often.
#[derive(clap::Args)]
pub(super) struct ModelsArgs {
    /// GGUF files
    #[arg(
        short,
        long,
        value_name = "FILE",
        value_delimiter = ',',
        env = "LLAMA_ARG_MODEL"
    )]
    pub(super) model: Vec<PathBuf>,
    /// Made-up weights of a shape instead of a file, and a file type: llama-1b, llama-8b, qwen3-8b, gemma3-4b,
    /// some layers of gpt-oss-20b, qwen3-30b-a3b, deepseek-v3.2, …; `--synthetic help` lists all
    #[arg(long, value_name = "SHAPE:TYPE", value_delimiter = ',')]
    synthetic: Vec<String>,
    /// Threads, at most 1024; 0 is as many as this process may use, as is the default
    #[arg(
        short,
        long,
        value_name = "LIST",
        default_value = "0",
        hide_default_value = true,
        env = "LLAMA_ARG_THREADS",
        allow_negative_numbers = true
    )]
    threads: Vec<String>,
    /// Most tokens computed at a time
    #[arg(long = "ubatch-size", value_name = "N", default_value_t = 512, env = "LLAMA_ARG_UBATCH",
          allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    ubatch_size: u32,
    /// The same, by its other name: the smaller counts
    #[arg(short, long, value_name = "N", default_value_t = 2048, env = "LLAMA_ARG_BATCH",
          allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    /// Compute prompts as generated tokens are
    #[arg(long)]
    exact: bool,
    /// Repetitions of each test
    #[arg(short, long, value_name = "N", default_value_t = 5, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: u32,
    /// How to print
    #[arg(short, long, value_enum, default_value_t = Format::Md)]
    pub(super) output: Format,
    #[command(flatten)]
    cache_type: CacheTypeArgs,
    #[command(flatten)]
    placement: PlacementArgs,
}

impl ModelsArgs {
    /// Numbers of threads to measure with.
    pub(super) fn threads(&self) -> Result<Vec<usize>, Failure> {
        let mut threads = list(&self.threads.join(","), "-t")?;
        if let Some(n) = threads.iter().find(|&&n| n > MAX_THREADS as usize) {
            return Err(Failure::Usage(format!(
                "-t {n}: at most {MAX_THREADS} threads"
            )));
        }
        threads
            .iter_mut()
            .filter(|n| **n == 0)
            .for_each(|n| *n = default_threads());
        Ok(threads)
    }

    /// Shapes and types of --synthetic.
    pub(super) fn shapes(&self) -> Result<Vec<(Shape, FileType)>, Failure> {
        if self.model.is_empty() == self.synthetic.is_empty() {
            return Err(Failure::Usage(
                "give either -m FILE or --synthetic SHAPE:TYPE".into(),
            ));
        }
        self.synthetic.iter().map(|name| shape(name)).collect()
    }

    /// Repetitions of each test.
    pub(super) fn repetitions(&self) -> usize {
        self.repetitions as usize
    }

    /// Options of sessions.
    pub(super) fn options(&self) -> SessionOptions {
        let mut options = SessionOptions {
            n_batch: self.ubatch_size.min(self.batch_size) as usize,
            exact: self.exact,
            ..Default::default()
        };
        self.cache_type.apply(KvType::F16, &mut options);
        options
    }

    /// Opens one model after the other, and hands each with its name to `measure`; `made_up` makes
    /// the file of a shape.
    pub(super) fn each(
        &self,
        made_up: impl Fn(&Shape, FileType) -> Result<Gguf, Failure>,
        mut measure: impl FnMut(&Model, &str) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let shapes = self.shapes()?;
        for path in &self.model {
            let name = path.file_name().map_or_else(
                || path.display().to_string(),
                |n| n.to_string_lossy().into_owned(),
            );
            measure(&open(Gguf::open(path)?, &self.placement, &name)?, &name)?;
        }
        for (name, (shape, file_type)) in self.synthetic.iter().zip(shapes) {
            let model = open(made_up(&shape, file_type)?, &self.placement, name)?;
            measure(&model, name)?;
        }
        Ok(())
    }
}

/// The shape and type that `SHAPE:TYPE` names.
pub(super) fn shape(name: &str) -> Result<(Shape, FileType), Failure> {
    let unknown = |what: &str, known: String| {
        Failure::Usage(format!("--synthetic {name}: {what}, known are {known}"))
    };
    let (shape, file_type) = name.split_once(':').unwrap_or((name, "Q4_K_M"));
    let types = FileType::ALL
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    Ok((
        Shape::from_name(shape).ok_or_else(|| unknown("no such shape", Shape::names()))?,
        FileType::from_name(file_type).ok_or_else(|| unknown("no such type", types))?,
    ))
}
