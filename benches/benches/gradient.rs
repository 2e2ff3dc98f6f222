//! The backward pass on a 1B shape, as a multiple of a prefill of the same tokens, and the
//! accumulation of a gradient for one token. `cargo bench -p ruvllm-benches --bench gradient [--
//! ROUNDS]`; passes take turns, so that what else the machine does meets all of them.

use ruvllm::Model;
use ruvllm::SessionOptions;
use ruvllm::arch::Arch;
use ruvllm::lora::TargetModule;
use ruvllm::lora::{Adapter, Gradients};
use ruvllm::quant::FileType;
use ruvllm_benches::{Shape, synthetic};
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

const TOKENS: usize = 512;
const RANK: usize = 2;

/// CPU time of this process, in seconds, where the system tells.
fn cpu_time() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some((fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?) / 100.0)
}

/// Which matrices are trained.
type Targets<'a> = &'a dyn Fn(&TargetModule) -> bool;

fn passes(rounds: usize) {
    let shape = Shape::from_name("llama-1b").unwrap();
    let gguf = synthetic(&shape, FileType::Q4_K_M).unwrap();
    let model = Model::from_gguf(gguf).unwrap();
    let n_layer = model.hparams().n_layer;
    let last_quarter =
        |site: &TargetModule| site.layer().is_some_and(|i| i >= n_layer - n_layer / 4);
    let in_layer = |site: &TargetModule| site.layer().is_some();
    let background =
        |site: &TargetModule| site.part().starts_with("ffn") || site.part() == "attn_output";
    let targets: [(&str, Targets<'_>); 3] = [
        ("last quarter, feed-forward and attention output", &|s| {
            last_quarter(s) && background(s)
        }),
        ("last quarter, all matrices", &last_quarter),
        ("all layers, all matrices", &in_layer),
    ];
    let n_vocab = model.hparams().n_vocab;
    let tokens: Vec<u32> = (0..TOKENS).map(|i| (i * 7919 % n_vocab) as u32).collect();
    let mut adapter = Adapter::zeros(&model, RANK, 1, in_layer).unwrap();
    for (_, term) in adapter.terms_mut() {
        term.parts_mut().1.fill(1e-3);
    }
    let adapter = Arc::new(adapter);
    let options = SessionOptions {
        n_ctx: Some(TOKENS),
        ..Default::default()
    };
    let mut session = model.session_with(&options).unwrap();
    let mut times = vec![Vec::new(); 1 + targets.len()];
    for _ in 0..=rounds {
        for i in 0..times.len() {
            // An adapter of what is trained, and nothing else; the prefill has none.
            let id = (i > 0).then(|| {
                let (_, wanted) = targets[i - 1];
                let mut own = Adapter::zeros(&model, RANK, 1, wanted).unwrap();
                own.terms_mut()
                    .for_each(|(_, term)| term.parts_mut().1.fill(1e-3));
                session.adapters().attach(Arc::new(own), 1.0).unwrap()
            });
            session.clear();
            let mut gradients = id.map(|_| Gradients::for_terms(&adapter, targets[i - 1].1));
            let (wall, cpu) = (Instant::now(), cpu_time());
            match (id, &mut gradients) {
                (Some(id), Some(gradients)) => {
                    let loss = session
                        .training()
                        .nll_gradient(id, &tokens, &tokens, &[1.0; TOKENS], gradients)
                        .unwrap();
                    assert!(loss.is_finite() && gradients.norm() > 0.0);
                    session.adapters().detach(id).unwrap();
                }
                _ => {
                    session.prefill(&tokens).unwrap();
                    black_box(session.logits());
                }
            }
            let cpu = cpu
                .zip(cpu_time())
                .map_or(f64::NAN, |(then, now)| now - then);
            times[i].push((wall.elapsed().as_secs_f64(), cpu));
        }
    }
    let column = |times: &[(f64, f64)], cpu: bool| {
        // Without the first round, which touches memory for the first time.
        let mut column: Vec<f64> = times[1..]
            .iter()
            .map(|t| if cpu { t.1 } else { t.0 })
            .collect();
        column.sort_by(f64::total_cmp);
        (column[0], column[column.len() / 2])
    };
    println!(
        "{TOKENS} tokens, llama-1b Q4_K_M, {} threads, rank {RANK}, {rounds} rounds",
        session.engine().n_threads()
    );
    println!(
        "{:52} {:>9} {:>9} {:>9} {:>9}",
        "", "min ms", "x prefill", "CPU ms", "x prefill"
    );
    let base = (column(&times[0], false), column(&times[0], true));
    for (name, times) in ["prefill"]
        .into_iter()
        .chain(targets.iter().map(|t| t.0))
        .zip(&times)
    {
        let (wall, cpu) = (column(times, false), column(times, true));
        println!(
            "{name:52} {:9.0} {:9.2} {:9.0} {:9.2}",
            1e3 * wall.0,
            wall.0 / base.0.0,
            1e3 * cpu.0,
            cpu.0 / base.1.0
        );
    }
}

/// `dA += (Bᵀ·dy)·xᵀ` and `dB += dy·(A·x)ᵀ` for one token and an `n × n` matrix.
fn accumulation(n: usize) {
    let values = |seed: usize, n: usize| {
        (0..n)
            .map(|i| ((i + seed) * 7919 % 255) as f32 / 255.0 - 0.5)
            .collect()
    };
    let (x, dy): (Vec<f32>, Vec<f32>) = (values(1, n), values(2, n));
    let (a, b): (Vec<f32>, Vec<f32>) = (values(3, RANK * n), values(4, RANK * n));
    for arch in Arch::available() {
        let (mut da, mut db) = (vec![0.0; RANK * n], vec![0.0; RANK * n]);
        let mut best = f64::INFINITY;
        for _ in 0..200 {
            let start = Instant::now();
            for _ in 0..50 {
                for r in 0..RANK {
                    let row = r * n..(r + 1) * n;
                    arch.add_scaled(
                        &mut da[row.clone()],
                        black_box(&x),
                        arch.dot(&dy, &b[row.clone()]),
                    );
                    arch.add_scaled(&mut db[row.clone()], black_box(&dy), arch.dot(&x, &a[row]));
                }
            }
            best = best.min(start.elapsed().as_secs_f64() / 50.0);
        }
        black_box((&da, &db));
        println!(
            "accumulation, {n} x {n}, rank {RANK}, {}: {:.2} us",
            arch.name(),
            1e6 * best
        );
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let quick = arguments.iter().any(|a| a == "--test");
    let rounds = arguments.iter().find_map(|a| a.parse().ok()).unwrap_or(5);
    for n in [768, 2048, 4096] {
        accumulation(n);
    }
    if !quick {
        passes(rounds);
    }
}
