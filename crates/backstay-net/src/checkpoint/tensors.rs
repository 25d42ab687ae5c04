//! The header of a file of tensors, made and checked by the crate of the format.
//!
//! The crate's own writer takes all tensors at once and chooses their order and the file. Parts
//! and exports are written piece by piece, so only their header is made here.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{SafeTensorError, SafeTensors};
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, Visitor};

pub use safetensors::Dtype;

/// Bytes of the number before the header that says how long it is.
const LENGTH_BYTES: usize = 8;

/// The header for tensors (name, type, shape) in the order given, its length in front.
pub fn make_header(
    metadata: BTreeMap<String, String>,
    tensors: impl IntoIterator<Item = (String, Dtype, Vec<usize>)>,
) -> Result<Vec<u8>, SafeTensorError> {
    let mut end = 0;
    let place = |(name, dtype, shape): (String, Dtype, Vec<usize>)| {
        let begin = end;
        let bits = shape.iter().product::<usize>() * dtype.bitsize();
        end += bits / 8;
        let info = TensorInfo {
            dtype,
            shape,
            data_offsets: (begin, end),
        };
        (name, info)
    };
    let tensors = tensors.into_iter().map(place).collect();
    let header = Metadata::new(Some(metadata.into_iter().collect()), tensors)?;
    // A value sorts its names, so equal headers have equal bytes.
    let mut text = serde_json::to_value(&header)?.to_string().into_bytes();
    // So that the arrays behind it are aligned.
    text.resize(text.len().next_multiple_of(LENGTH_BYTES), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text);
    Ok(header)
}

/// A JSON object in which no name comes twice, and whose values are of this kind. The crate takes
/// the last of two, and other readers the first.
struct Unique<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Unique<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self(PhantomData))
    }
}

impl<'de, V: Deserialize<'de>> Visitor<'de> for Unique<V> {
    type Value = Self;

    fn expecting(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
        text.write_str("an object in which no name comes twice")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self, A::Error> {
        let mut names = BTreeSet::new();
        while let Some(name) = entries.next_key::<String>()? {
            entries.next_value::<V>()?;
            if let Some(twice) = names.replace(name) {
                return Err(A::Error::custom(format!("{twice:?} comes twice")));
            }
        }
        Ok(self)
    }
}

/// What the header of a file says.
pub struct Header {
    metadata: Metadata,
    begin: usize,
}

impl Header {
    /// Read and check the header of a file: its tensors fill the file without gap or overlap.
    pub fn read(file: &[u8]) -> Result<Self, SafeTensorError> {
        let (length, metadata) = SafeTensors::read_metadata(file)?;
        let begin = LENGTH_BYTES + length;
        serde_json::from_slice::<Unique<Unique<IgnoredAny>>>(&file[LENGTH_BYTES..begin])
            .map_err(SafeTensorError::InvalidHeaderDeserialization)?;
        Ok(Self { metadata, begin })
    }

    /// Texts about the file as a whole.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        let texts = self.metadata.metadata().clone().unwrap_or_default();
        texts.into_iter().collect()
    }

    /// The names of the tensors, in the order of their bytes.
    pub fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    /// Type and shape of a tensor, and its bytes in the file.
    pub fn tensor(&self, name: &str) -> Option<(Dtype, &[usize], Range<usize>)> {
        let info = self.metadata.info(name)?;
        let (begin, end) = info.data_offsets;
        let range = self.begin + begin..self.begin + end;
        Some((info.dtype, &info.shape, range))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use proptest::prelude::*;

    /// A file of two tensors, 32 and 24 bytes.
    fn two_tensors() -> Vec<u8> {
        let tensors = [
            ("a".to_owned(), Dtype::U64, vec![2, 2]),
            ("b".to_owned(), Dtype::F32, vec![3, 2]),
        ];
        let metadata = BTreeMap::from([("format".to_owned(), "x".to_owned())]);
        let mut file = make_header(metadata, tensors).unwrap();
        assert_eq!(file.len() % 8, 0);
        file.resize(file.len() + 32 + 24, 7);
        file
    }

    #[test]
    fn what_is_written_is_read() {
        let mut file = two_tensors();
        let header = Header::read(&file).unwrap();
        assert_eq!(header.metadata()["format"], "x");
        assert_eq!(header.names(), ["a", "b"]);
        let (dtype, shape, range) = header.tensor("b").unwrap();
        assert_eq!((dtype, shape), (Dtype::F32, &[3, 2][..]));
        assert_eq!(range, file.len() - 24..file.len());
        assert!(header.tensor("c").is_none());
        file.pop();
        assert!(Header::read(&file).is_err());
    }

    #[test]
    fn bytes_that_nobody_reads_or_two_do_are_refused() {
        let file = two_tensors();
        for (from, to) in [("[32,56]", "[ 0,32]"), ("[0,32]", "[8,40]")] {
            let mut places = file.windows(from.len());
            let at = places.position(|bytes| bytes == from.as_bytes()).unwrap();
            let mut changed = file.clone();
            changed[at..at + to.len()].copy_from_slice(to.as_bytes());
            assert!(Header::read(&changed).is_err());
        }
        let mut longer = file;
        longer.push(0);
        assert!(Header::read(&longer).is_err());
    }

    #[test]
    fn a_huge_header_or_shape_is_not_believed() {
        let mut file = u64::MAX.to_le_bytes().to_vec();
        file.extend(b"{}");
        assert!(Header::read(&file).is_err());
        let text =
            br#"{"a":{"dtype":"U64","shape":[4294967296,4294967296,8],"data_offsets":[0,0]}}"#;
        let mut file = (text.len() as u64).to_le_bytes().to_vec();
        file.extend(text);
        assert!(Header::read(&file).is_err());
    }

    proptest! {
        /// No bytes make it panic or point outside of the file.
        #[test]
        fn any_bytes_are_survived(tail in prop::collection::vec(any::<u8>(), 0..200), length in 0u64..210) {
            let mut file = length.to_le_bytes().to_vec();
            file.extend(tail);
            if let Ok(header) = Header::read(&file) {
                for name in header.names() {
                    prop_assert!(header.tensor(&name).unwrap().2.end <= file.len());
                }
            }
        }
    }
}
