//! Sums over a row, in an order of their own: the same bits on every machine.

/// Partial sums that are taken side by side.
const LANES: usize = 4;

/// The sum of `value(i)` for i below `count`, in float64: element i goes to lane i mod 4, and the
/// lanes are added from the first to the last.
#[inline]
pub(super) fn row_sum(count: usize, value: impl Fn(usize) -> f64) -> f64 {
    let mut lanes = [0.0; LANES];
    let whole = count - count % LANES;
    for start in (0..whole).step_by(LANES) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += value(start + lane);
        }
    }
    for (sum, at) in lanes.iter_mut().zip(whole..count) {
        *sum += value(at);
    }
    lanes.into_iter().fold(0.0, |sum, lane| sum + lane)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp)] // Exact results are the point.

    use super::*;

    #[test]
    fn each_element_counts_once() {
        for count in 0..20 {
            let expected: f64 = (0..count).map(|i| (1 << i) as f64).sum();
            assert_eq!(row_sum(count, |i| (1u64 << i) as f64), expected);
        }
    }

    #[test]
    fn the_order_is_that_of_the_lanes() {
        // 1e16 + 1 is 1e16: one order of adding gives 2, most others 0 or 1.
        let values = [1e16, 1.0, -1e16, 1.0, -1e16, 0.0, 1e16, 0.0];
        assert_eq!(row_sum(values.len(), |i| values[i]), 2.0);
    }
}
