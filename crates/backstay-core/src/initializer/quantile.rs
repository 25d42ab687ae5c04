//! The inverse of the normal distribution function.

// The digits are the paper's.
#![allow(clippy::excessive_precision)]

/// The standard normal quantile of a probability from 1e-10 to 1 - 1e-10.
///
/// Source: M. Wichura, "Algorithm AS 241: the percentage points of the normal distribution",
/// Applied Statistics 37 (1988), PPND16 without its far tails; relative accuracy about 1e-16.
pub(super) fn normal_quantile(probability: f64) -> f64 {
    const CENTRE_TOP: [f64; 8] = [
        2_509.080_928_730_122_672_7,
        33_430.575_583_588_128_105,
        67_265.770_927_008_700_853,
        45_921.953_931_549_871_457,
        13_731.693_765_509_461_125,
        1_971.590_950_306_551_442_7,
        133.141_667_891_784_377_45,
        3.387_132_872_796_366_608_0,
    ];
    const CENTRE_BOTTOM: [f64; 8] = [
        5_226.495_278_852_854_561_0,
        28_729.085_735_721_942_674,
        39_307.895_800_092_710_610,
        21_213.794_301_586_595_867,
        5_394.196_021_424_751_107_7,
        687.187_007_492_057_908_30,
        42.313_330_701_600_911_252,
        1.0,
    ];
    const TAIL_TOP: [f64; 8] = [
        7.745_450_142_783_414_076_40e-4,
        2.272_384_498_926_918_458_33e-2,
        2.417_807_251_774_506_117_70e-1,
        1.270_458_252_452_368_382_58,
        3.647_848_324_763_204_605_04,
        5.769_497_221_460_691_405_50,
        4.630_337_846_156_545_295_90,
        1.423_437_110_749_683_577_34,
    ];
    const TAIL_BOTTOM: [f64; 8] = [
        1.050_750_071_644_416_843_24e-9,
        5.475_938_084_995_344_946_00e-4,
        1.519_866_656_361_645_719_66e-2,
        1.481_039_764_274_800_745_90e-1,
        6.897_673_349_851_000_045_50e-1,
        1.676_384_830_183_803_849_40,
        2.053_191_626_637_758_821_87,
        1.0,
    ];
    let centred = probability - 0.5;
    if centred.abs() <= 0.425 {
        let r = 0.180_625 - centred * centred;
        return centred * polynomial(&CENTRE_TOP, r) / polynomial(&CENTRE_BOTTOM, r);
    }
    let tail = if centred < 0.0 {
        probability
    } else {
        1.0 - probability
    };
    let r = libm::sqrt(-libm::log(tail)) - 1.6;
    let value = polynomial(&TAIL_TOP, r) / polynomial(&TAIL_BOTTOM, r);
    if centred < 0.0 {
        -value
    } else {
        value
    }
}

/// Horner's rule, highest power first.
fn polynomial(coefficients: &[f64; 8], x: f64) -> f64 {
    coefficients
        .iter()
        .fold(0.0, |sum, coefficient| sum * x + coefficient)
}
