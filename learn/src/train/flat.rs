//! The values of an adapter as one list.

use ruvllm::lora::Adapter;

/// All values of an adapter, site by site, `A` before `B`.
pub(super) fn flat(adapter: &Adapter) -> Vec<f32> {
    adapter
        .terms()
        .flat_map(|(_, term)| term.a().iter().chain(term.b()))
        .copied()
        .collect()
}

pub(super) fn set_flat(adapter: &mut Adapter, mut values: &[f32]) {
    for (_, term) in adapter.terms_mut() {
        let (a, b) = term.parts_mut();
        for part in [a, b] {
            let (head, rest) = values.split_at(part.len());
            part.copy_from_slice(head);
            values = rest;
        }
    }
}
