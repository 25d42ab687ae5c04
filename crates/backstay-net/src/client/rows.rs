//! Moving rows between a caller's array and frames: spread on a pull, merged on a push.

use super::plan::Entry;

/// Copy the row of each entry from `rows` (which starts at unique key `first`) to its place in
/// `out`, \[batch, `elements`].
pub fn spread(entries: &[Entry], first: usize, rows: &[f32], out: &mut [f32], elements: usize) {
    match elements {
        1 => spread_sized::<1>(entries, first, rows, out),
        4 => spread_sized::<4>(entries, first, rows, out),
        8 => spread_sized::<8>(entries, first, rows, out),
        16 => spread_sized::<16>(entries, first, rows, out),
        32 => spread_sized::<32>(entries, first, rows, out),
        64 => spread_sized::<64>(entries, first, rows, out),
        _ => {
            for entry in entries {
                let row = &rows[(entry.unique as usize - first) * elements..][..elements];
                out[entry.index as usize * elements..][..elements].copy_from_slice(row);
            }
        }
    }
}

/// The usual widths as constants: a copy of known length is a few instructions, not a call.
fn spread_sized<const N: usize>(entries: &[Entry], first: usize, rows: &[f32], out: &mut [f32]) {
    let (rows, out) = (rows.as_chunks::<N>().0, out.as_chunks_mut::<N>().0);
    for entry in entries {
        out[entry.index as usize] = rows[entry.unique as usize - first];
    }
}

/// Sum the values of entries with the same key into `merged` (which starts at unique key
/// `first`), in the order of the batch.
pub fn merge(entries: &[Entry], first: usize, values: &[f32], merged: &mut [f32], elements: usize) {
    match elements {
        1 => merge_sized::<1>(entries, first, values, merged),
        4 => merge_sized::<4>(entries, first, values, merged),
        8 => merge_sized::<8>(entries, first, values, merged),
        16 => merge_sized::<16>(entries, first, values, merged),
        32 => merge_sized::<32>(entries, first, values, merged),
        64 => merge_sized::<64>(entries, first, values, merged),
        _ => {
            let mut fresh = first;
            for entry in entries {
                let value = &values[entry.index as usize * elements..][..elements];
                let unique = entry.unique as usize;
                let sum = &mut merged[(unique - first) * elements..][..elements];
                if unique == fresh {
                    // Unique keys are numbered in the order in which they first occur.
                    sum.copy_from_slice(value);
                    fresh += 1;
                } else {
                    sum.iter_mut()
                        .zip(value)
                        .for_each(|(sum, value)| *sum += value);
                }
            }
        }
    }
}

/// The same with the shows and clicks of the batch behind the values of each key: rows of `merged`
/// have two elements more than those of `values`.
pub fn merge_observed(
    entries: &[Entry],
    first: usize,
    values: &[f32],
    (shows, clicks): (&[f32], &[f32]),
    merged: &mut [f32],
    width: usize,
) {
    let mut fresh = first;
    for entry in entries {
        let (index, unique) = (entry.index as usize, entry.unique as usize);
        let value = &values[index * (width - 2)..][..width - 2];
        let sum = &mut merged[(unique - first) * width..][..width];
        if unique == fresh {
            sum[..width - 2].copy_from_slice(value);
            sum[width - 2..].copy_from_slice(&[shows[index], clicks[index]]);
            fresh += 1;
            continue;
        }
        for (sum, value) in sum.iter_mut().zip(value) {
            *sum += value;
        }
        sum[width - 2] += shows[index];
        sum[width - 1] += clicks[index];
    }
}

/// The same with what tells from where they come behind those of each key, and shows and clicks
/// behind these if they are told. `references` have `told` values for each unique key, from `first`
/// on.
pub fn merge_compared(
    entries: &[Entry],
    first: usize,
    (values, references): (&[f32], &[f32]),
    observed: Option<(&[f32], &[f32])>,
    merged: &mut [f32],
    [width, told]: [usize; 2],
) {
    let elements = width - told - if observed.is_some() { 2 } else { 0 };
    let mut fresh = first;
    for entry in entries {
        let (index, unique) = (entry.index as usize, entry.unique as usize);
        let value = &values[index * elements..][..elements];
        let row = &mut merged[(unique - first) * width..][..width];
        let (sum, rest) = row.split_at_mut(elements);
        if unique == fresh {
            sum.fill(0.0);
            let (reference, counts) = rest.split_at_mut(told);
            reference.copy_from_slice(&references[(unique - first) * told..][..told]);
            counts.fill(0.0);
            fresh += 1;
        }
        for (sum, value) in sum.iter_mut().zip(value) {
            *sum += value;
        }
        if let Some((shows, clicks)) = observed {
            rest[told] += shows[index];
            rest[told + 1] += clicks[index];
        }
    }
}

fn merge_sized<const N: usize>(
    entries: &[Entry],
    first: usize,
    values: &[f32],
    merged: &mut [f32],
) {
    let (values, merged) = (values.as_chunks::<N>().0, merged.as_chunks_mut::<N>().0);
    let mut fresh = first;
    for entry in entries {
        let value = &values[entry.index as usize];
        let unique = entry.unique as usize;
        let sum = &mut merged[unique - first];
        if unique == fresh {
            *sum = *value;
            fresh += 1;
        } else {
            for (sum, value) in sum.iter_mut().zip(value) {
                *sum += value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shows_and_clicks_are_merged_behind_the_gradients() {
        let entries = [(2, 5), (0, 6), (1, 5)].map(|(index, unique)| Entry { index, unique });
        let values = [1.0, 2.0, 10.0, 20.0, 100.0, 200.0];
        let (shows, clicks) = ([1.0, 2.0, 4.0], [8.0, 16.0, 32.0]);
        let mut merged = [9.0; 8];
        merge_observed(&entries, 5, &values, (&shows, &clicks), &mut merged, 4);
        assert_eq!(merged.map(|one| one as u32), [110, 220, 6, 48, 1, 2, 1, 8]);
    }

    #[test]
    fn weights_are_merged_behind_the_gradients() {
        let entries = [(2, 5), (0, 6), (1, 5)].map(|(index, unique)| Entry { index, unique });
        let values = [1.0, 2.0, 10.0, 20.0, 100.0, 200.0];
        let weights = [7.0, 8.0, 9.0, 3.0];
        let mut merged = [9.0; 8];
        merge_compared(&entries, 5, (&values, &weights), None, &mut merged, [4, 2]);
        assert_eq!(merged.map(|one| one as u32), [110, 220, 7, 8, 1, 2, 9, 3]);
        let (shows, clicks) = ([1.0, 2.0, 4.0], [8.0, 16.0, 32.0]);
        let mut merged = [9.0; 12];
        let told = Some((&shows[..], &clicks[..]));
        merge_compared(&entries, 5, (&values, &weights), told, &mut merged, [6, 2]);
        let wanted = [110, 220, 7, 8, 6, 48, 1, 2, 9, 3, 1, 8];
        assert_eq!(merged.map(|one| one as u32), wanted);
        let (sums, mut merged) = ([7.0, 8.0, 9.0, 3.0, 4.0, 5.0], [9.0; 10]);
        merge_compared(&entries, 5, (&values, &sums), None, &mut merged, [5, 3]);
        let wanted = [110, 220, 7, 8, 9, 1, 2, 3, 4, 5];
        assert_eq!(merged.map(|one| one as u32), wanted);
    }

    #[test]
    fn rows_are_spread_and_merged_at_every_width() {
        let entries =
            [(2, 5), (0, 6), (1, 5), (3, 7)].map(|(index, unique)| Entry { index, unique });
        for elements in [1usize, 3, 4, 8, 16, 32, 64] {
            let rows: Vec<f32> = (0..3 * elements).map(|x| x as f32).collect();
            let mut out = vec![-1.0; 4 * elements];
            spread(&entries, 5, &rows, &mut out, elements);
            for (index, unique) in [(2, 0), (0, 1), (1, 0), (3, 2)] {
                assert_eq!(
                    out[index * elements..][..elements],
                    rows[unique * elements..][..elements]
                );
            }
            let mut merged = vec![9.0; 3 * elements];
            merge(&entries, 5, &out, &mut merged, elements);
            let doubled: Vec<f32> = rows[..elements].iter().map(|x| x * 2.0).collect();
            assert_eq!(merged[..elements], doubled);
            assert_eq!(merged[elements..], rows[elements..]);
        }
    }
}
