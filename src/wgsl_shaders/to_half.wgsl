// Half precision, rounded by integer operations, as the language leaves the direction of its own conversion open.

// The f16 nearest to x, of which ties go to the even one.
fn to_half(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) {
        return sign | 0x7E00u;
    }
    if (magnitude >= 0x477FF000u) { // above the largest f16 and half a step
        return sign | 0x7C00u;
    }
    if (magnitude < 0x33000000u) { // below half of the smallest f16
        return sign;
    }
    if (magnitude < 0x38800000u) { // denormal
        let shift = 126u - (magnitude >> 23u);
        let whole = (magnitude & 0x7FFFFFu) | 0x800000u;
        let kept = whole >> shift;
        let rest = whole & ((1u << shift) - 1u);
        let middle = 1u << (shift - 1u);
        return sign | (kept + u32(rest > middle || (rest == middle && (kept & 1u) == 1u)));
    }
    return sign | ((magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13u) & 1u)) >> 13u);
}
