package inboxtest

import (
	"context"
	"strings"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// A claim and its transaction, without the middleware.
var claimCases = []kitCase{
	{"a free key is claimed, and processed once committed", claimFreeKey},
	{"a rolled back key is free again, and its effect is gone", rollBackFreesKey},
	{"rolling back after the commit, and twice, does nothing", rollBackAfterCommit},
	{"a duplicate's transaction leaves the record as it is", duplicateLeavesRecord},
	{"keys are compared byte by byte, in both parts", keysCompareByteByByte},
	{"a consumer does not see another one's records", consumersHaveOwnRecords},
	{"what is stored and marked belongs to one consumer", storedBelongsToOneConsumer},
	{"a claim under an ended context fails and holds nothing", claimUnderEndedContext},
	{"a transaction does not outlive its context", transactionEndsWithContext},
	{"a commit under an ended context fails with the context's error", commitUnderEndedContext},
	{"a look sees what is committed, and waits for nothing", lookWaitsForNothing},
}

func claimFreeKey(k *kit) {
	key := k.key()
	k.process(key, "effect")
	record := k.wantProcessed(key)
	if age := time.Since(record.ProcessedAt).Abs(); age > time.Hour {
		k.Fatalf("the record says it was processed at %s, which is %s from now", record.ProcessedAt, age)
	}
	if record.Key != key {
		k.Fatalf("the record is of %s, want %s", record.Key, key)
	}
	if record.Produced != nil {
		k.Fatalf("nothing was stored, yet the record has %d bytes of produced messages", len(record.Produced))
	}
	k.wantEffects("effect")
}

func rollBackFreesKey(k *kit) {
	key := k.key()
	transaction := k.claim(k.context(), key)
	if err := k.Write(inbox.ContextWithTransaction(k.context(), transaction), "lost"); err != nil {
		k.Fatal(err)
	}
	if err := transaction.Rollback(); err != nil {
		k.Fatalf("cannot roll back: %v", err)
	}
	k.wantEffects()
	k.process(key, "effect")
	k.wantEffects("effect")
}

func rollBackAfterCommit(k *kit) {
	key := k.key()
	transaction := k.claim(k.context(), key)
	if err := transaction.Commit(k.context()); err != nil {
		k.Fatal(err)
	}
	for range 2 {
		if err := transaction.Rollback(); err != nil {
			k.Fatalf("rollback after commit: %v", err)
		}
	}
	k.wantProcessed(key)
}

func duplicateLeavesRecord(k *kit) {
	key := k.key()
	k.process(key, "effect")
	for range 3 {
		k.wantProcessed(key)
	}
	k.wantEffects("effect")
}

// A collation that ignores case or accents merges two ids, and the second message is lost. Bad quoting and type
// conversion do the same.
func keysCompareByteByByte(k *kit) {
	names := []string{
		"aB3xK", "Ab3xK", "ab3xk", "aB3xK ", " aB3xK", "äb", "ab", "a\u0308b", "ß", "ss",
		"1", "01", "1.0", "1e0", "0x1", "NULL", "true",
		"'", "''", `\`, `\\`, `\'`, `"`, `$1`, `?`, `:a`, "@a", "%s", "--", "/*", ";", "a\nb", "a\r\nb", "a\tb", "\x01", "\x7f",
		"'); DROP TABLE watermill_inbox; --", `E'\047'`, "$$", "$tag$", "日本語", "🙂", "\u200b", "\ufeff", "İ", "i",
		strings.Repeat("x", maxKeyBytes), strings.Repeat("x", maxKeyBytes-1), strings.Repeat("🙂", maxKeyBytes/4),
	}
	for _, name := range names {
		k.process(inbox.Key{Consumer: "kit", MessageID: name}, "id "+name)
		k.process(inbox.Key{Consumer: name, MessageID: "kit"}, "consumer "+name)
	}
	var effects []string
	for _, name := range names {
		k.wantProcessed(inbox.Key{Consumer: "kit", MessageID: name})
		k.wantProcessed(inbox.Key{Consumer: name, MessageID: "kit"})
		effects = append(effects, "id "+name, "consumer "+name)
	}
	k.wantEffects(effects...)
}

// One event goes to two consumers. A key without the consumer would drop the second one's copy.
func consumersHaveOwnRecords(k *kit) {
	k.process(inbox.Key{Consumer: "a", MessageID: "1"}, "a")
	k.process(inbox.Key{Consumer: "b", MessageID: "1"}, "b")
	k.wantProcessed(inbox.Key{Consumer: "a", MessageID: "1"})
	k.wantProcessed(inbox.Key{Consumer: "b", MessageID: "1"})
	// The parts do not run into each other.
	k.process(inbox.Key{Consumer: "ab", MessageID: "c"}, "ab c")
	k.process(inbox.Key{Consumer: "a", MessageID: "bc"}, "a bc")
	k.wantEffects("a", "b", "ab c", "a bc")
}

func storedBelongsToOneConsumer(k *kit) {
	keys := []inbox.Key{{Consumer: "a", MessageID: "1"}, {Consumer: "b", MessageID: "1"}}
	for _, key := range keys {
		transaction := k.claim(k.context(), key)
		if _, err := transaction.Store(k.context(), inbox.StoreParams{Topic: "events", Produced: []byte("of " + key.Consumer)}); err != nil {
			k.Fatal(err)
		}
		if err := transaction.Commit(k.context()); err != nil {
			k.Fatal(err)
		}
	}
	for _, key := range keys {
		if got := string(k.wantProcessed(key).Produced); got != "of "+key.Consumer {
			k.Fatalf("%s has %q", key, got)
		}
	}
	k.markSent(*k.wantProcessed(keys[0]))
	if k.wantProcessed(keys[0]).Produced != nil || k.wantProcessed(keys[1]).Produced == nil {
		k.Fatal("the mark went to another consumer's record")
	}
}

func claimUnderEndedContext(k *kit) {
	key := k.key()
	ctx, cancel := context.WithCancel(k.context())
	cancel()
	if _, _, err := k.Repository.Claim(ctx, inbox.ClaimParams{Key: key}); err == nil {
		k.Fatal("the claim succeeded")
	}
	k.process(key, "effect")
}

func transactionEndsWithContext(k *kit) {
	key := k.key()
	ctx, cancel := context.WithCancel(k.context())
	transaction := k.claim(ctx, key)
	if err := k.Write(inbox.ContextWithTransaction(ctx, transaction), "lost"); err != nil {
		k.Fatal(err)
	}
	cancel()
	// Waits for the rollback, which nobody has asked for.
	k.process(key, "effect")
	if err := transaction.Commit(k.context()); err == nil {
		k.Fatal("the commit of a transaction whose context had ended succeeded")
	}
	if err := transaction.Rollback(); err != nil {
		k.Fatalf("rollback after the context has ended: %v", err)
	}
	k.wantEffects("effect")
}

func commitUnderEndedContext(k *kit) {
	key := k.key()
	ctx, cancel := context.WithCancel(k.context())
	transaction := k.claim(ctx, key)
	cancel()
	if err := transaction.Commit(ctx); err == nil {
		k.Fatal("the commit succeeded")
	}
	k.process(key, "effect")
}

func lookWaitsForNothing(k *kit) {
	looker, ok := k.Repository.(inbox.Looker)
	if !ok {
		k.Skip("the repository has no inbox.Looker")
	}
	look := func(key inbox.Key) *inbox.Record {
		k.Helper()
		record, err := looker.Look(k.context(), inbox.ClaimParams{Key: key})
		if err != nil {
			k.Fatalf("look at %s: %v", key, err)
		}
		return record
	}
	key, other := k.key(), k.key()
	other.Consumer = "another"
	if record := look(key); record != nil {
		k.Fatalf("a free key has the record %+v", record)
	}
	transaction := k.claim(k.context(), key)
	if record := look(key); record != nil {
		k.Fatalf("an open claim is seen: %+v", record)
	}
	if _, err := transaction.Store(k.context(), inbox.StoreParams{Topic: "events", Produced: []byte("stored")}); err != nil {
		k.Fatal(err)
	}
	if err := transaction.Commit(k.context()); err != nil {
		k.Fatal(err)
	}
	want := k.wantProcessed(key)
	if record := look(key); record == nil || record.Key != key || !record.ProcessedAt.Equal(want.ProcessedAt) || string(record.Produced) != "stored" {
		k.Fatalf("the look says %+v, the claim %+v", record, want)
	}
	other.MessageID = key.MessageID
	if record := look(other); record != nil {
		k.Fatalf("another consumer's record is seen: %+v", record)
	}
	ctx, cancel := context.WithCancel(k.context())
	cancel()
	if record, err := looker.Look(ctx, inbox.ClaimParams{Key: key}); err == nil {
		k.Fatalf("under an ended context: %+v", record)
	}
}
