use ruvllm::exec::{Engine, EngineOptions};
use ruvllm::model::Model;
use ruvllm::train::{Example, TrainOptions, Trainer};
fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let n_steps: usize = args[1].parse().unwrap();
    let model = if args[0].contains(".gguf") {
        Model::open(&args[0]).unwrap()
    } else {
        let shape = ruvllm::bench::Shape::from_name("llama-1b").unwrap().with_layers(4);
        Model::from_gguf(
            ruvllm::bench::synthetic(shape, ruvllm::quant::FileType::from_name(&args[0]).unwrap()).unwrap(),
        )
        .unwrap()
    };
    let nt = std::env::var("NT").ok().map_or(2, |x| x.parse().unwrap());
    let engine =
        Engine::new(&model, &EngineOptions { n_threads: std::num::NonZero::new(nt), ..Default::default() }).unwrap();
    let n_vocab = model.hparams().n_vocab;
    for n in args[2..].iter().map(|n| n.parse::<usize>().unwrap()) {
        let text = |i: usize| (0..=n).map(|j| ((i * 7919 + j * j * 31 + j) % n_vocab) as u32).collect::<Vec<_>>();
        let examples: Vec<Example> = (0..512 / n).map(|i| Example::text(&text(i))).collect();
        let options = TrainOptions {
            batch: examples.len(),
            held_out: 0.0,
            epochs: n_steps as f32 + 1.0,
            n_ctx: 512,
            ..Default::default()
        };
        let mut trainer = Trainer::new(&engine, &examples, &[], &options).unwrap();
        let mut times: Vec<f64> = (0..n_steps)
            .map(|_| {
                let begun = std::time::Instant::now();
                trainer.step().unwrap();
                begun.elapsed().as_secs_f64()
            })
            .collect();
        times.sort_by(f64::total_cmp);
        let rows = (512 / n * n) as f64;
        let report = trainer.report();
        println!(
            "{}, examples of {n}: best {:.0} median {:.0} tokens/s ({:.2} ms), loss {:.9}",
            args[0],
            rows / times[0],
            rows / times[n_steps / 2],
            times[0] * 1e3,
            report.steps.last().unwrap().loss
        );
    }
}
