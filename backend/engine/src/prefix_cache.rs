//! Which block holds the KV of which prefix.
//!
//! A block's key is a hash of all tokens up to its end: of its own, and of the key before it. So equal keys mean equal
//! prefixes, and a block found under a key can stand in any block table whose tokens give that key. The hash is keyed by
//! random numbers of this process, so that nobody can prepare two prefixes with one key, and 128 bits wide, so that
//! chance does not.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hash, Hasher, RandomState};

use drafthorse_control::{AdapterId, BlockId, TokenId};

/// The key of a prefix that ends with a full block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefixKey(u64, u64);

/// Half of a key finds its place in a map: it is a hash already, and no caller knows its secret.
impl Hash for PrefixKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0);
    }
}

/// Hands on the one number it is given.
#[derive(Default)]
struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        // Keys write one u64. This is right for anything, if slow.
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

/// The block of each known prefix. Holds no references: the block manager tells it when a block is reused.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    hashers: [RandomState; 2],
    blocks: HashMap<PrefixKey, BlockId, BuildHasherDefault<AsIs>>,
}

impl PrefixCache {
    /// With room for all blocks, so that it never grows while steps run.
    pub(crate) fn new(num_blocks: usize) -> Self {
        PrefixCache {
            hashers: Default::default(),
            blocks: HashMap::with_capacity_and_hasher(num_blocks, BuildHasherDefault::default()),
        }
    }

    /// The key before the first block. Sequences that must not share have different ones.
    pub(crate) fn root(&self, salt: u64, adapter: Option<AdapterId>) -> PrefixKey {
        self.hash((salt, adapter))
    }

    /// The key of the block of `tokens` that follows `parent`.
    pub(crate) fn child(&self, parent: PrefixKey, tokens: &[TokenId]) -> PrefixKey {
        self.hash((parent.0, parent.1, tokens))
    }

    fn hash(&self, value: impl Hash) -> PrefixKey {
        let [first, second] = &self.hashers;
        PrefixKey(first.hash_one(&value), second.hash_one(&value))
    }

    /// The blocks of the longest known prefix.
    pub(crate) fn find(&self, keys: &[PrefixKey]) -> Vec<BlockId> {
        keys.iter().map_while(|key| self.blocks.get(key).copied()).collect()
    }

    /// Makes `block` findable; false if the prefix has a block already.
    pub(crate) fn insert(&mut self, key: PrefixKey, block: BlockId) -> bool {
        let entry = self.blocks.entry(key);
        let is_new = matches!(entry, std::collections::hash_map::Entry::Vacant(_));
        entry.or_insert(block);
        is_new
    }

    pub(crate) fn remove(&mut self, key: PrefixKey) {
        self.blocks.remove(&key);
    }

    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_stands_for_all_tokens_before_it() {
        let cache = PrefixCache::new(0);
        let key = |salt, adapter: Option<u32>, blocks: &[&[TokenId]]| {
            let root = cache.root(salt, adapter.map(AdapterId));
            blocks.iter().fold(root, |parent, tokens| cache.child(parent, tokens))
        };
        assert_eq!(key(0, None, &[&[1, 2], &[3, 4]]), key(0, None, &[&[1, 2], &[3, 4]]));
        assert_ne!(key(0, None, &[&[1, 2], &[3, 4]]), key(0, None, &[&[2, 1], &[3, 4]]), "another block before it");
        assert_ne!(key(0, None, &[&[1, 2], &[3, 4]]), key(0, None, &[&[3, 4]]), "another place");
        assert_ne!(key(0, None, &[&[1, 2]]), key(7, None, &[&[1, 2]]), "another salt");
        assert_ne!(key(0, None, &[&[1, 2]]), key(0, Some(0), &[&[1, 2]]), "an adapter");
    }

    #[test]
    fn finds_blocks_up_to_the_first_gap() {
        let mut cache = PrefixCache::new(0);
        let mut keys = vec![cache.root(0, None)];
        for block in 0..3 {
            keys.push(cache.child(keys[block], &[7, 7]));
        }
        assert!(cache.insert(keys[1], BlockId(5)));
        assert!(cache.insert(keys[3], BlockId(6)));
        assert!(!cache.insert(keys[1], BlockId(9)), "the first one stays");
        assert_eq!(cache.find(&keys[1..]), [BlockId(5)]);
        cache.remove(keys[1]);
        assert_eq!(cache.find(&keys[1..]), []);
        assert_eq!(cache.len(), 1);
    }

    /// `cargo test --release -p drafthorse-engine finding -- --ignored --nocapture`
    #[test]
    #[ignore = "prints a time"]
    #[allow(clippy::print_stdout, reason = "a bench prints")]
    fn finding_a_prefix_of_8192_tokens() {
        let num_blocks = 1 << 16;
        let mut cache = PrefixCache::new(num_blocks);
        let mut prefixes = Vec::new();
        for prefix in 0..num_blocks / 512 {
            let mut keys = vec![cache.root(prefix as u64, None)];
            for block in 0..512 {
                keys.push(cache.child(keys[block], &[block as TokenId; 16]));
                cache.insert(keys[block + 1], BlockId((prefix * 512 + block) as u32));
            }
            prefixes.push(keys);
        }
        let begun = std::time::Instant::now();
        let found: usize = prefixes.iter().map(|keys| cache.find(&keys[1..]).len()).sum();
        println!("{:.2} us", begun.elapsed().as_secs_f64() * 1e6 / prefixes.len() as f64);
        assert_eq!(found, num_blocks);
    }
}
