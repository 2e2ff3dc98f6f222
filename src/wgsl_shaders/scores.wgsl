// Shared by the attention of prompts and of generated tokens.

// First position that a row at `pos` sees: 0 or, if `window` is not 0, that of the last `window` positions, or of its chunk of
// so many positions.
fn first_seen(pos: u32) -> u32 {
    if (p.chunked != 0u) {
        return pos - pos % p.window;
    }
    return select(0u, pos + 1u - p.window, p.window != 0u && pos + 1u > p.window);
}

// ALiBi's slope of a head, 0 if `alibi` is: the last head's is `2^-alibi`. If the number of heads is no power of two, those
// beyond the largest power take every other slope of a model with twice as many.
fn slope_of(head: u32) -> f32 {
    if (p.alibi == 0.0) {
        return 0.0;
    }
    let n = 1u << firstLeadingBit(p.n_head);
    let exponent = select(f32(2u * (head - n) + 1u) / 2.0, f32(head + 1u), head < n);
    return exp_negative(-0.693147181 * (p.alibi * exponent / f32(n)));
}

// The score of a key that lies `distance` positions back.
fn score_of(product: f32, slope: f32, distance: u32) -> f32 {
    return fma(-slope, f32(distance), softcapped(product, p.softcap));
}
