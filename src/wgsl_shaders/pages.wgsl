// Keys and values of sequences. A page has 64 positions of a group of layers. Each layer has the keys of its heads, then
// their values; a head's 64 rows are a block, laid out as src/arch/kv.rs describes. Pages lie in up to four buffers,
// `slab_0` to `slab_3`: a page table holds the number of the buffer and the word at which a page begins. A row of a batch
// has its position and the index at which its sequence's page table begins.

const PAGE_POSITIONS: u32 = 64u;
// Bits per value in f16, which has no scales; all others, 8, 6, 5 and 4, have one per GROUP values.
const F16_BITS: u32 = 16u;
const GROUP: u32 = 32u;

// Bytes of a block with rows of `dim` values.
fn block_bytes(bits: u32, dim: u32) -> u32 {
    if (bits == F16_BITS) {
        return PAGE_POSITIONS * dim * 2u;
    }
    return PAGE_POSITIONS * ((dim + GROUP - 1u) / GROUP) * (4u * bits + 2u);
}

// Number of the group of values c .. of a row of a block, and the word at which the block's planes begin: the four upper
// bits of all values, their lower bits, a bf16 scale per group.
struct Planes {
    upper: u32,
    lower: u32,
    scales: u32,
}

fn planes(block: u32, bits: u32, dim: u32) -> Planes {
    let groups = PAGE_POSITIONS * ((dim + GROUP - 1u) / GROUP);
    let lower = block + 4u * groups;
    return Planes(block, lower, lower + (bits - 4u) * groups);
}
