//! Gain of the best change of temperature alone, chosen in hindsight.

use crate::learn::softmax;
use ruvllm::arch::Arch;

/// Temperatures that are tried.
const TEMPERATURES: [f32; 10] = [0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0];

/// Losses of each chunk at each temperature.
#[derive(Clone, Debug, Default)]
pub(super) struct Tempered {
    losses: [Vec<f64>; TEMPERATURES.len()],
    divided: Vec<f32>,
}

impl Tempered {
    pub(super) fn next_chunk(&mut self) {
        self.losses.iter_mut().for_each(|losses| losses.push(0.0));
    }

    /// Adds a token of the latest chunk.
    pub(super) fn add(&mut self, arch: Arch, logits: &[f32], token: u32, p: &mut Vec<f32>) {
        for (losses, temperature) in self.losses.iter_mut().zip(TEMPERATURES) {
            self.divided.clear();
            self.divided.extend(logits.iter().map(|l| l / temperature));
            let loss = softmax(arch, &self.divided, p) - f64::from(self.divided[token as usize]);
            *losses.last_mut().unwrap_or(&mut 0.0) += loss;
        }
    }

    /// Losses by chunk at the temperature with the smallest sum.
    pub(super) fn best(&self) -> &[f64] {
        let sum = |losses: &[f64]| losses.iter().sum::<f64>();
        self.losses
            .iter()
            .map(Vec::as_slice)
            .min_by(|x, y| sum(x).total_cmp(&sum(y)))
            .unwrap_or(&[])
    }
}
