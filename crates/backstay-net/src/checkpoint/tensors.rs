//! The safetensors container: a JSON header with names, types, shapes and places, then the arrays.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Deserialize;

/// Bytes of a header, at most: as the format's own library has it.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Bytes of the number before the header that says how long it is.
pub const LENGTH_BYTES: usize = 8;

/// The types of numbers that parts have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum Kind {
    /// Unsigned 64-bit.
    U64,
    /// 32-bit floats.
    F32,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::U64 => "U64",
            Self::F32 => "F32",
        }
    }

    fn bytes(self) -> u64 {
        match self {
            Self::U64 => 8,
            Self::F32 => 4,
        }
    }
}

/// An array to be written.
pub struct Tensor<'a> {
    /// Its name.
    pub name: String,
    /// Its type.
    pub kind: Kind,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its numbers, little-endian.
    pub bytes: &'a [u8],
}

impl<'a> Tensor<'a> {
    /// Rows of unsigned numbers.
    pub fn numbers(name: String, columns: Option<usize>, values: &'a [u64]) -> Self {
        let shape = columns.map_or(vec![values.len()], |n| vec![values.len() / n, n]);
        Self {
            name,
            kind: Kind::U64,
            shape,
            bytes: bytemuck::cast_slice(values),
        }
    }

    /// `rows` rows of floats.
    pub fn floats(name: String, rows: usize, values: &'a [f32]) -> Self {
        Self {
            name,
            kind: Kind::F32,
            shape: vec![rows, values.len() / rows.max(1)],
            bytes: bytemuck::cast_slice(values),
        }
    }
}

/// The header for tensors in the order given, its length in front.
pub fn header(metadata: &[(&str, &str)], tensors: &[Tensor<'_>]) -> Vec<u8> {
    let mut entries = serde_json::Map::new();
    let words: serde_json::Map<_, _> = metadata
        .iter()
        .map(|&(name, value)| (name.to_owned(), value.into()))
        .collect();
    entries.insert("__metadata__".into(), words.into());
    let mut at = 0;
    for tensor in tensors {
        let end = at + tensor.bytes.len();
        let entry = serde_json::json!({
            "dtype": tensor.kind.name(),
            "shape": tensor.shape,
            "data_offsets": [at, end],
        });
        entries.insert(tensor.name.clone(), entry);
        at = end;
    }
    let mut text = serde_json::Value::Object(entries).to_string().into_bytes();
    // So that the arrays behind it are aligned.
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text);
    header
}

/// Where an array of a file is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its type.
    pub kind: Kind,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its bytes in the file.
    pub range: Range<usize>,
}

#[derive(Deserialize)]
struct Entry {
    dtype: Kind,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Read the header of a file; says in words what is wrong with it.
pub fn read_header(file: &[u8]) -> Result<BTreeMap<String, Place>, String> {
    let length: [u8; LENGTH_BYTES] = file
        .get(..LENGTH_BYTES)
        .and_then(|bytes| bytes.try_into().ok())
        .ok_or("it is too short for a header")?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_BYTES_MAX {
        return Err(format!("a header of {length} bytes is too long"));
    }
    let data = LENGTH_BYTES + length as usize;
    let text = file
        .get(LENGTH_BYTES..data)
        .ok_or("its header is cut off")?;
    let entries: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(text).map_err(|error| format!("its header: {error}"))?;
    let mut places = BTreeMap::new();
    for (name, value) in entries {
        if name == "__metadata__" {
            continue;
        }
        let wrong = |what: String| format!("tensor {name:?}: {what}");
        let entry: Entry =
            serde_json::from_value(value).map_err(|error| wrong(error.to_string()))?;
        let bytes = entry
            .shape
            .iter()
            .try_fold(entry.dtype.bytes(), |product, &n| product.checked_mul(n))
            .ok_or_else(|| wrong("its shape is too large".into()))?;
        let (begin, end) = entry.data_offsets;
        if end.checked_sub(begin) != Some(bytes) || end > (file.len() - data) as u64 {
            return Err(wrong(format!(
                "bytes {begin} to {end} do not fit its shape or the file"
            )));
        }
        let place = Place {
            kind: entry.dtype,
            shape: entry.shape.iter().map(|&n| n as usize).collect(),
            range: data + begin as usize..data + end as usize,
        };
        places.insert(name, place);
    }
    check_contiguous(&places, data, file.len())?;
    Ok(places)
}

/// Refuse tensors with gaps between them, or that overlap: bytes that nobody reads, or two do.
fn check_contiguous(
    places: &BTreeMap<String, Place>,
    begin: usize,
    end: usize,
) -> Result<(), String> {
    let mut ranges: Vec<&Range<usize>> = places.values().map(|place| &place.range).collect();
    ranges.sort_by_key(|range| (range.start, range.end));
    let mut at = begin;
    for range in ranges {
        if range.start != at {
            return Err(format!("its tensors do not follow each other at byte {at}"));
        }
        at = range.end;
    }
    if at == end {
        return Ok(());
    }
    Err(format!("{} bytes are of no tensor", end - at))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_written_is_read() {
        let (numbers, floats) = ([1, 2, 3, 4], [0.5f32; 6]);
        let tensors = [
            Tensor::numbers("a".into(), Some(2), &numbers),
            Tensor::floats("b".into(), 3, &floats),
        ];
        let mut file = header(&[("format", "x")], &tensors);
        assert_eq!(file.len() % 8, 0);
        for tensor in &tensors {
            file.extend(tensor.bytes);
        }
        let places = read_header(&file).unwrap();
        assert_eq!(places["a"].shape, [2, 2]);
        assert_eq!(
            &file[places["b"].range.clone()],
            bytemuck::cast_slice::<f32, u8>(&floats)
        );
        file.pop();
        assert!(read_header(&file).unwrap_err().contains("tensor \"b\""));
    }

    #[test]
    fn bytes_that_nobody_reads_or_two_do_are_refused() {
        let numbers = [1, 2, 3, 4];
        let tensors = [
            Tensor::numbers("a".into(), None, &numbers[..2]),
            Tensor::numbers("b".into(), None, &numbers[2..]),
        ];
        let mut file = header(&[], &tensors);
        file.extend(bytemuck::cast_slice::<u64, u8>(&numbers));
        assert!(read_header(&file).is_ok());
        for (from, to) in [("[16,32]", "[ 0,16]"), ("[0,16]", "[8,24]")] {
            let mut places = file.windows(from.len());
            let at = places.position(|bytes| bytes == from.as_bytes()).unwrap();
            let mut changed = file.clone();
            changed[at..at + to.len()].copy_from_slice(to.as_bytes());
            let said = read_header(&changed).unwrap_err();
            assert!(said.contains("follow each other"), "{said}");
        }
        file.push(0);
        assert!(read_header(&file).unwrap_err().contains("of no tensor"));
    }

    #[test]
    fn a_huge_header_is_not_believed() {
        let mut file = u64::MAX.to_le_bytes().to_vec();
        file.extend(b"{}");
        assert!(read_header(&file).unwrap_err().contains("too long"));
    }

    #[test]
    fn a_shape_that_overflows_is_not_believed() {
        let text =
            br#"{"a":{"dtype":"U64","shape":[4294967296,4294967296,8],"data_offsets":[0,0]}}"#;
        let mut file = (text.len() as u64).to_le_bytes().to_vec();
        file.extend(text);
        assert!(read_header(&file).unwrap_err().contains("too large"));
    }

    proptest! {
        /// No bytes make it panic or point outside of the file.
        #[test]
        fn any_bytes_are_survived(tail in prop::collection::vec(any::<u8>(), 0..200), length in 0u64..210) {
            let mut file = length.to_le_bytes().to_vec();
            file.extend(tail);
            if let Ok(places) = read_header(&file) {
                prop_assert!(places.values().all(|place| place.range.end <= file.len()));
            }
        }
    }
}
