package inboxtest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
)

// The cleaner deletes expired records, and only these.
var retentionCases = []kitCase{
	{"expired records are deleted in batches, younger ones are kept", expiredRecordsAreDeleted},
	{"the limit holds, oldest first", deletionLimitOldestFirst},
	{"a deletion goes on from a time", deletionFromATime},
	{"a deletion that takes too long deletes nothing, and says so", deletionTakesTooLong},
	{"only expired unsent records are counted", expiredUnsentAreCounted},
	{"effects stay when their record goes", effectsOutliveRecord},
	{"an ended context deletes nothing", passUnderEndedContext},
	{"Run ends with its context", runEndsWithContext},
	{"each consumer has its own retention", retentionPerConsumer},
	{"another service's records are not touched", othersRecordsStay},
	{"a retention of a consumer without records is said loudly", retentionOfUnknownConsumer},
	{"unsent records go only by their own limit, with a line for each", unsentGoByTheirOwnLimit},
	{"progress is told after each batch and at the end", progressAfterEachBatch},
	{"a record of the future is kept", recordOfTheFuture},
	{"a record that cannot be that old is kept, and said", recordOfAWrongClock},
	{"the longest retention is no trouble", longestRetention},
	{"a copy that comes when its record has been deleted runs again", copyAfterDeletion},
	{"a copy that races the deletion of its record is a duplicate or runs", copyRacesDeletion},
}

func expiredRecordsAreDeleted(k *kit) {
	var expired, young []inbox.Key
	for i := range 7 {
		key := k.key()
		k.process(key, key.MessageID)
		if i < 2 {
			young = append(young, key)
			continue
		}
		if err := k.Age(k.context(), key, 2*time.Hour); err != nil {
			k.Fatal(err)
		}
		expired = append(expired, key)
	}
	k.wantPass(3*time.Hour, inbox.CleanerPass{})
	k.wantPass(time.Hour, inbox.CleanerPass{Deleted: len(expired)})
	k.wantPass(time.Hour, inbox.CleanerPass{})
	for _, key := range young {
		k.wantProcessed(key)
	}
	for _, key := range expired {
		_ = k.claim(k.context(), key).Rollback()
	}
}

func deletionLimitOldestFirst(k *kit) {
	oldest, newer := k.key(), k.key()
	for key, age := range map[inbox.Key]time.Duration{newer: 2 * time.Hour, oldest: 3 * time.Hour} {
		k.process(key, key.MessageID)
		if err := k.Age(k.context(), key, age); err != nil {
			k.Fatal(err)
		}
	}
	deleted, last, err := k.records().DeleteProcessed(k.context(), inbox.DeleteProcessedParams{Consumer: consumer, Before: time.Now().Add(-time.Hour), Limit: 1})
	if err != nil || deleted != 1 || (time.Since(last)-3*time.Hour).Abs() > time.Minute {
		k.Fatalf("deleted %d, the last of %s, %v, want 1 of three hours ago", deleted, last, err)
	}
	k.wantProcessed(newer)
	_ = k.claim(k.context(), oldest).Rollback()
}

func deletionFromATime(k *kit) {
	var keys []inbox.Key
	for hours := range 5 {
		key := k.key()
		key.Consumer = consumer
		keys = append(keys, key)
		k.process(key, key.MessageID)
		if err := k.Age(k.context(), key, time.Duration(hours)*time.Hour); err != nil {
			k.Fatal(err)
		}
	}
	from, before := time.Now().Add(-3*time.Hour-time.Minute), time.Now().Add(-time.Hour-time.Minute)
	params := inbox.DeleteProcessedParams{Consumer: consumer, From: from, Before: before, Limit: 10}
	deleted, last, err := k.records().DeleteProcessed(k.context(), params)
	if err != nil || deleted != 2 || (time.Since(last)-2*time.Hour).Abs() > time.Minute {
		k.Fatalf("deleted %d, the last of %s, %v, want 2, the last of two hours ago", deleted, last, err)
	}
	params.From = last
	if deleted, _, err := k.records().DeleteProcessed(k.context(), params); err != nil || deleted != 0 {
		k.Fatalf("deleted %d more, %v", deleted, err)
	}
	for i, key := range keys {
		if i == 2 || i == 3 {
			_ = k.claim(k.context(), key).Rollback()
		} else {
			k.wantProcessed(key)
		}
	}
}

func deletionTakesTooLong(k *kit) {
	key := k.key()
	key.Consumer = consumer
	k.process(key, key.MessageID)
	if err := k.Age(k.context(), key, 2*time.Hour); err != nil {
		k.Fatal(err)
	}
	params := inbox.DeleteProcessedParams{Consumer: consumer, Before: time.Now().Add(-time.Hour), Limit: 1, Timeout: time.Nanosecond}
	if deleted, _, err := k.records().DeleteProcessed(k.context(), params); deleted != 0 || !errors.Is(err, inbox.ErrBatchTimeout) {
		k.Fatalf("deleted %d, %v, want ErrBatchTimeout", deleted, err)
	}
	k.wantProcessed(key)
}

func expiredUnsentAreCounted(k *kit) {
	for i := range 2 {
		key := k.key()
		k.processUnsent(key)
		if i == 0 {
			if err := k.Age(k.context(), key, 2*time.Hour); err != nil {
				k.Fatal(err)
			}
		}
	}
	k.wantPass(time.Hour, inbox.CleanerPass{Deleted: 1, Unsent: 1})
}

func effectsOutliveRecord(k *kit) {
	key := k.key()
	k.process(key, "effect")
	if err := k.Age(k.context(), key, 2*time.Hour); err != nil {
		k.Fatal(err)
	}
	k.wantPass(time.Hour, inbox.CleanerPass{Deleted: 1})
	k.wantEffects("effect")
}

func passUnderEndedContext(k *kit) {
	key := k.key()
	k.process(key, "effect")
	if err := k.Age(k.context(), key, 2*time.Hour); err != nil {
		k.Fatal(err)
	}
	ctx, cancel := context.WithCancel(k.context())
	cancel()
	if pass, err := k.cleaner(inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: inbox.Retention{Default: time.Hour}}).Pass(ctx); err == nil || pass.Deleted != 0 {
		k.Fatalf("pass %+v, %v, want an error", pass, err)
	}
	k.wantProcessed(key)
}

func runEndsWithContext(k *kit) {
	ctx, cancel := context.WithCancel(k.context())
	done := make(chan error, 1)
	go func() {
		done <- k.cleaner(inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: inbox.Retention{Default: time.Hour}}).Run(ctx)
	}()
	cancel()
	select {
	case err := <-done:
		if err != context.Canceled {
			k.Fatalf("Run returned %v", err)
		}
	case <-time.After(patience):
		k.Fatal("Run did not return")
	}
}

func retentionPerConsumer(k *kit) {
	keys := map[string]inbox.Key{}
	for _, consumer := range []string{"default", "kept for ever", "short", "unsent"} {
		key := k.key()
		key.Consumer = consumer
		keys[consumer] = key
		if consumer == "unsent" {
			k.processUnsent(key)
		} else {
			k.process(key, consumer)
		}
		if err := k.Age(k.context(), key, 2*time.Hour); err != nil {
			k.Fatal(err)
		}
	}
	retention := inbox.Retention{Default: 3 * time.Hour, Consumers: map[string]time.Duration{
		"short": time.Hour, "kept for ever": inbox.KeepForever, "unsent": time.Hour,
	}}
	k.wantPassWith(inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: retention}, inbox.CleanerPass{Deleted: 2, Unsent: 1})
	retention.Default = time.Hour
	k.wantPassWith(inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: retention}, inbox.CleanerPass{Deleted: 1, Unsent: 1})
	k.wantProcessed(keys["kept for ever"])
	_ = k.claim(k.context(), keys["unsent"]).Rollback()
	for _, consumer := range []string{"default", "short"} {
		_ = k.claim(k.context(), keys[consumer]).Rollback()
	}
}

func othersRecordsStay(k *kit) {
	own, others, othersUnsent := k.key(), k.key(), k.key()
	own.Consumer, others.Consumer, othersUnsent.Consumer = "own", "another's", "another's"
	k.process(own, "effect")
	k.process(others, "effect")
	k.processUnsent(othersUnsent)
	for _, key := range []inbox.Key{own, others, othersUnsent} {
		if err := k.Age(k.context(), key, 48*time.Hour); err != nil {
			k.Fatal(err)
		}
	}
	for _, consumers := range []inbox.Consumers{{}, inbox.NamedConsumers(), inbox.NamedConsumers("own", "")} {
		if _, err := inbox.NewCleaner(k.records(), inbox.CleanerOptions{Consumers: consumers, Retention: inbox.Retention{Default: time.Hour}}); err == nil {
			k.Errorf("a cleaner for the consumers %+v", consumers)
		}
	}
	options := inbox.CleanerOptions{
		Consumers: inbox.NamedConsumers("own", "without records"), Retention: inbox.Retention{Default: time.Hour}, UnsentRetention: time.Hour,
	}
	k.wantPassWith(options, inbox.CleanerPass{Deleted: 1})
	k.wantProcessed(others)
	k.wantProcessed(othersUnsent)
	_ = k.claim(k.context(), own).Rollback()
	options.Retention.Consumers = map[string]time.Duration{"another's": time.Minute}
	if _, err := inbox.NewCleaner(k.records(), options); err == nil {
		k.Error("a cleaner with a retention of another service's consumer")
	}
}

func retentionOfUnknownConsumer(k *kit) {
	k.process(k.key(), "effect")
	logger := newCapture()
	k.wantPassWith(inbox.CleanerOptions{Logger: logger, Retention: inbox.Retention{
		Default: time.Hour, Consumers: map[string]time.Duration{"misspelt": inbox.KeepForever},
	}}, inbox.CleanerPass{})
	if lines := logger.errors(); len(lines) != 1 || !strings.Contains(lines[0], "misspelt") {
		k.Fatalf("error lines are %q", lines)
	}
}

func unsentGoByTheirOwnLimit(k *kit) {
	old, older := k.key(), k.key()
	for key, age := range map[inbox.Key]time.Duration{old: 2 * time.Hour, older: 5 * time.Hour} {
		k.processUnsent(key)
		if err := k.Age(k.context(), key, age); err != nil {
			k.Fatal(err)
		}
	}
	logger := newCapture()
	options := inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: inbox.Retention{Default: time.Hour}, Logger: logger}
	k.wantPassWith(options, inbox.CleanerPass{Deleted: 2, Unsent: 2})
	options.UnsentRetention = 4 * time.Hour
	k.wantPassWith(options, inbox.CleanerPass{Unsent: 1, UnsentDeleted: 1})
	found, err := k.records().FindRecords(k.context(), inbox.Selection{Unsent: true}, inbox.Record{}, 2)
	if err != nil || len(found) != 1 || found[0].Key != old {
		k.Fatalf("left are %v, %v", found, err)
	}
	if lines := logger.errors(); len(lines) != 1 || !strings.Contains(lines[0], older.MessageID) {
		k.Fatalf("error lines are %q, want one that names %s", lines, older)
	}
	// Shorter than the retention, it does not count.
	options.Retention.Default = 3 * time.Hour
	options.UnsentRetention = time.Hour
	k.wantPassWith(options, inbox.CleanerPass{})
}

func progressAfterEachBatch(k *kit) {
	for range 5 {
		key := k.key()
		k.process(key, key.MessageID)
		if err := k.Age(k.context(), key, 2*time.Hour); err != nil {
			k.Fatal(err)
		}
	}
	var (
		told []int
		last inbox.CleanerObservation
	)
	k.wantPassWith(inbox.CleanerOptions{
		Retention: inbox.Retention{Default: time.Hour},
		Observe: func(_ context.Context, observation inbox.CleanerObservation) {
			if last.Done {
				k.Errorf("observed after the end: %+v", observation)
			}
			told, last = append(told, observation.Deleted), observation
		},
	}, inbox.CleanerPass{Deleted: 5})
	if want := []int{2, 4, 5}; !slices.Equal(told, want) || !last.Done || last.Err != nil {
		k.Fatalf("told %v, want %v, at the end %+v", told, want, last)
	}
}

func recordOfTheFuture(k *kit) {
	// As after a clock that was ahead and went back.
	key := k.key()
	k.process(key, "effect")
	if err := k.Age(k.context(), key, -48*time.Hour); err != nil {
		k.Fatal(err)
	}
	k.wantPass(time.Hour, inbox.CleanerPass{})
	k.wantProcessed(key)
}

func recordOfAWrongClock(k *kit) {
	key := k.key()
	k.process(key, "effect")
	if err := k.Age(k.context(), key, time.Since(time.Unix(0, 0))); err != nil {
		k.Fatal(err)
	}
	k.wantPass(time.Hour, inbox.CleanerPass{Implausible: 1})
	k.wantProcessed(key)
}

func longestRetention(k *kit) {
	k.process(k.key(), "effect")
	k.wantPass(inbox.KeepForever-1, inbox.CleanerPass{})
}

func copyAfterDeletion(k *kit) {
	var runs atomic.Int32
	d := k.deliver(k.Repository, inbox.Options{}, false, k.effect(&runs))
	key := k.key()
	key.Consumer = consumer
	d.want(acked, key)
	if err := k.Age(k.context(), key, 2*time.Hour); err != nil {
		k.Fatal(err)
	}
	d.want(acked, key)
	k.wantRuns(&runs, 1)
	k.wantPass(time.Hour, inbox.CleanerPass{Deleted: 1})
	d.want(acked, key)
	k.wantRuns(&runs, 2)
}

func copyRacesDeletion(k *kit) {
	for range 20 {
		var runs atomic.Int32
		d := k.deliver(k.Repository, inbox.Options{}, false, func(*message.Message) ([]*message.Message, error) {
			runs.Add(1)
			return nil, nil
		})
		key := k.key()
		key.Consumer = consumer
		d.want(acked, key)
		if err := k.Age(k.context(), key, 2*time.Hour); err != nil {
			k.Fatal(err)
		}
		deleted := make(chan error, 1)
		go func() {
			_, err := k.cleaner(inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: inbox.Retention{Default: time.Hour}}).Pass(k.context())
			deleted <- err
		}()
		for got := nacked; got == nacked; { // a claim that meets the deletion may be told to try again
			got = d.send(key, k.context())
		}
		if err := <-deleted; err != nil {
			k.Fatal(err)
		}
		// Whatever it was, there is a record now, or the copy was a duplicate before the deletion.
		if got := runs.Load(); got == 2 {
			k.wantProcessed(key)
		} else if got != 1 {
			k.Fatalf("the handler ran %d times", got)
		}
	}
}
