    // Computes `sum_i_j`, the products of rows `8 * ty + i` of the activations with rows `tx + 16 * j` of the weights.
    let tx = t % 16u;
    let ty = t / 16u;
    let to = t / 2u * 8u + t % 2u * 4u;
    let turn = t / 2u % 8u;
//! for i < 8
//! for j < 4
    var sum_$i_$j = 0.0;
//! end
//! end
    let n_columns = $COLUMNS;
    for (var column = 0u; column < n_columns; column += 32u) {
        let i = column / 16u + t % 2u;
        var weights = mat4x4<f32>();
        if (has_w && 16u * i < p.n_in) {
            weights = part(w_row, i, p.n_in);
        }
        var values = mat4x4<f32>();
        if (has_x && 16u * i < p.n_in) {
            values = acts(x_row, i, p.n_in);
        }
        workgroupBarrier(); // the panels before are read
        to_w_panel(to, turn, weights);
        to_x_panel(to, turn, values);
        workgroupBarrier();
        for (var c = 0u; c < 8u; c++) {
//! for i < 8
            let x_$i = x_panel[(8u * ty + $iu) * 8u + (c ^ $iu)];
//! end
//! for j < 4
            let w_$j = w_panel[(tx + 16u * $ju) * 8u + (c ^ (tx % 8u))];
//! for i < 8
            sum_$i_$j = fma(x_$i.w, w_$j.w, fma(x_$i.z, w_$j.z, fma(x_$i.y, w_$j.y, fma(x_$i.x, w_$j.x, sum_$i_$j))));
//! end
//! end
        }
    }
