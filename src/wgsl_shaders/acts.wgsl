// Activations of products.

// Values 16 * i .. + 16 of the row of n values at `at` of `x`; zeros after its end.
fn acts(at: u32, i: u32, n: u32) -> mat4x4<f32> {
//! if WIDE
    let first = at / 4u + 4u * i;
    return mat4x4<f32>(x[first], x[first + 1u], x[first + 2u], x[first + 3u]);
//! else
    var values = mat4x4<f32>();
//! for v < 4
//! for c < 4
    if (16u * i + 4u * $vu + $cu < n) {
        values[$v][$c] = x[at + 16u * i + 4u * $vu + $cu];
    }
//! end
//! end
    return values;
//! end
}
