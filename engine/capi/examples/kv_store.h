// The store of kv_server: entries in the order of their keys. Its user holds `store_lock`.

#ifndef EXAMPLE_KV_STORE_H
#define EXAMPLE_KV_STORE_H

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    uint32_t key_len, value_len;
    unsigned char bytes[]; // key, value
};

static struct entry **store;
static size_t entries, capacity;
static pthread_rwlock_t store_lock = PTHREAD_RWLOCK_INITIALIZER;

static int compare(const struct entry *entry, const unsigned char *key, uint32_t len) {
    uint32_t shorter = entry->key_len < len ? entry->key_len : len;
    int order = shorter ? memcmp(entry->bytes, key, shorter) : 0;
    return order ? order : (entry->key_len > len) - (entry->key_len < len);
}

// Returns the index of the first entry that is not before `key`, and sets `found` if that entry has the key.
static size_t search(const unsigned char *key, uint32_t len, int *found) {
    size_t low = 0, high = entries;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (compare(store[middle], key, len) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    *found = low < entries && compare(store[low], key, len) == 0;
    return low;
}

// Inserts an entry, and frees it after a failure.
static int insert(struct entry *entry) {
    int found;
    size_t at = search(entry->bytes, entry->key_len, &found);
    if (found) {
        free(store[at]);
    } else {
        if (entries == capacity) {
            size_t more = capacity ? 2 * capacity : 1024;
            struct entry **grown = realloc(store, more * sizeof *store);
            if (!grown) {
                free(entry);
                return -1;
            }
            store = grown;
            capacity = more;
        }
        memmove(&store[at + 1], &store[at], (entries - at) * sizeof *store);
        entries++;
    }
    store[at] = entry;
    return 0;
}

static void store_free(void) {
    while (entries)
        free(store[--entries]);
    free(store);
}

#endif
