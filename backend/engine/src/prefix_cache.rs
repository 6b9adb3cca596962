//! Which block holds the KV of which prefix.
//!
//! A block's key is a hash of all tokens up to its end: of its own, and of the key before it. So equal keys mean equal
//! prefixes, and a block found under a key can stand in any block table whose tokens give that key. The hash is keyed by
//! random numbers of this process, so that nobody can prepare two prefixes with one key, and 128 bits wide, so that
//! chance does not.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hash, Hasher, RandomState};
use std::num::NonZeroU64;

use drafthorse_control::{AdapterId, BlockId, TokenId};

/// The key of a prefix that ends with a full block. One half is never zero, so that "no key" takes no further bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefixKey(NonZeroU64, u64);

/// Half of a key finds its place in a map: it is a hash already, and no caller knows its secret.
impl Hash for PrefixKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.get());
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
    /// By block: what it is found under, if it is. A long prefix is followed from block to block here: the map would miss the
    /// processor's caches for each.
    keys: Vec<Option<PrefixKey>>,
    /// By block: the one that was last put behind it. A guess: whether it is the one that is looked for, its key says.
    next: Vec<u32>,
}

impl PrefixCache {
    /// With room for all blocks, so that it never grows while steps run.
    pub(crate) fn new(num_blocks: usize) -> Self {
        PrefixCache {
            hashers: Default::default(),
            blocks: HashMap::with_capacity_and_hasher(num_blocks, BuildHasherDefault::default()),
            keys: vec![None; num_blocks],
            next: vec![u32::MAX; num_blocks],
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
        PrefixKey(NonZeroU64::new(first.hash_one(&value)).unwrap_or(NonZeroU64::MIN), second.hash_one(&value))
    }

    /// The blocks of the longest known prefix.
    pub(crate) fn find(&self, keys: &[PrefixKey]) -> Vec<BlockId> {
        let mut found: Vec<BlockId> = Vec::with_capacity(keys.len());
        for key in keys {
            let is_at = |block: u32| self.keys.get(block as usize).is_some_and(|there| *there == Some(*key));
            // Blocks that were filled one after the other mostly lie side by side. To look there first needs nothing read that
            // was not known before, so that the processor looks at many at once.
            let near = found.last().and_then(|last| {
                let beside = last.0.wrapping_add(1);
                if is_at(beside) { Some(beside) } else { Some(self.next[last.0 as usize]).filter(|&next| is_at(next)) }
            });
            match near.map(BlockId).or_else(|| self.blocks.get(key).copied()) {
                Some(block) => found.push(block),
                None => break,
            }
        }
        found
    }

    /// Makes `block` findable, which in its sequence stands behind `after`; false if the prefix has a block already.
    pub(crate) fn insert(&mut self, key: PrefixKey, block: BlockId, after: Option<BlockId>) -> bool {
        let std::collections::hash_map::Entry::Vacant(entry) = self.blocks.entry(key) else { return false };
        entry.insert(block);
        self.keys[block.0 as usize] = Some(key);
        if let Some(after) = after {
            self.next[after.0 as usize] = block.0;
        }
        true
    }

    pub(crate) fn remove(&mut self, key: PrefixKey) {
        if let Some(block) = self.blocks.remove(&key) {
            self.keys[block.0 as usize] = None;
        }
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
        let mut cache = PrefixCache::new(10);
        let keys = chain(&cache, &[[7, 7]; 3]);
        assert!(cache.insert(keys[0], BlockId(5), None));
        assert!(cache.insert(keys[2], BlockId(6), None));
        assert!(!cache.insert(keys[0], BlockId(9), None), "the first one stays");
        assert_eq!(cache.find(&keys), [BlockId(5)]);
        cache.remove(keys[0]);
        assert_eq!(cache.find(&keys), []);
        assert_eq!(cache.len(), 1);
    }

    /// The keys of a prefix of these blocks.
    fn chain(cache: &PrefixCache, blocks: &[[TokenId; 2]]) -> Vec<PrefixKey> {
        let mut key = cache.root(0, None);
        let next = |tokens: &[TokenId; 2]| {
            key = cache.child(key, tokens);
            key
        };
        blocks.iter().map(next).collect()
    }

    #[test]
    fn a_guess_that_is_wrong_or_old_changes_nothing() {
        let mut cache = PrefixCache::new(10);
        let (one, other) = (chain(&cache, &[[1, 1], [2, 2], [3, 3]]), chain(&cache, &[[1, 1], [4, 4], [3, 3]]));
        let put = |cache: &mut PrefixCache, keys: &[PrefixKey], blocks: [u32; 3]| {
            for (i, key) in keys.iter().enumerate() {
                cache.insert(*key, BlockId(blocks[i]), i.checked_sub(1).map(|before| BlockId(blocks[before])));
            }
        };
        put(&mut cache, &one, [3, 1, 0]);
        put(&mut cache, &other, [3, 9, 8]);
        // Both go on behind block 3, which remembers the second.
        assert_eq!(cache.find(&one), [3, 1, 0].map(BlockId));
        assert_eq!(cache.find(&other), [3, 9, 8].map(BlockId));
        // Block 9 is used for something else: what stood behind it is out of reach.
        cache.remove(other[1]);
        assert_eq!(cache.find(&other), [BlockId(3)]);
        let third = chain(&cache, &[[5, 5]]);
        assert!(cache.insert(third[0], BlockId(9), None));
        assert_eq!(cache.find(&other), [BlockId(3)]);
        assert_eq!(cache.find(&third), [BlockId(9)]);
        assert_eq!(cache.find(&one), [3, 1, 0].map(BlockId));
    }

    /// `cargo test --release -p drafthorse-engine finding -- --ignored --nocapture`
    #[test]
    #[ignore = "prints a time"]
    #[allow(clippy::print_stdout, reason = "a bench prints")]
    fn finding_a_prefix_of_8192_tokens() {
        let num_blocks: usize = 1 << 16;
        // Blocks side by side, and each anywhere.
        for (place, step) in [("side by side", 1), ("apart", 40503)] {
            let mut cache = PrefixCache::new(num_blocks);
            let mut prefixes = Vec::new();
            for prefix in 0..num_blocks / 512 {
                let mut keys = vec![cache.root(prefix as u64, None)];
                for block in 0..512 {
                    keys.push(cache.child(keys[block], &[block as TokenId; 16]));
                    let id = |at: usize| BlockId(((prefix * 512 + at) * step % num_blocks) as u32);
                    cache.insert(keys[block + 1], id(block), block.checked_sub(1).map(id));
                }
                prefixes.push(keys);
            }
            let mut times = Vec::new();
            for _ in 0..20 {
                let begun = std::time::Instant::now();
                let found: usize = prefixes.iter().map(|keys| cache.find(&keys[1..]).len()).sum();
                times.push(begun.elapsed().as_secs_f64() * 1e6 / prefixes.len() as f64);
                assert_eq!(found, num_blocks);
            }
            times.sort_by(f64::total_cmp);
            println!("{place}: {:.2} us, at best {:.2}", times[times.len() / 2], times[0]);
        }
    }
}
