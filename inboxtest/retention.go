package inboxtest

import (
	"context"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

var retentionCases = []kitCase{
	{"expired records are deleted in batches, younger ones are kept", func(k *kit) {
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
	}},
	{"the limit holds, oldest first", func(k *kit) {
		oldest, newer := k.key(), k.key()
		for key, age := range map[inbox.Key]time.Duration{newer: 2 * time.Hour, oldest: 3 * time.Hour} {
			k.process(key, key.MessageID)
			if err := k.Age(k.context(), key, age); err != nil {
				k.Fatal(err)
			}
		}
		deleted, err := k.Repository.DeleteProcessed(k.context(), time.Hour, 1)
		if err != nil || deleted != 1 {
			k.Fatalf("deleted %d, %v, want 1", deleted, err)
		}
		k.wantProcessed(newer)
		_ = k.claim(k.context(), oldest).Rollback()
	}},
	{"only expired unsent records are counted", func(k *kit) {
		for i := range 2 {
			key := k.key()
			transaction := k.claim(k.context(), key)
			if err := transaction.Store(k.context(), []byte("unsent")); err != nil {
				k.Fatal(err)
			}
			if err := transaction.Commit(k.context()); err != nil {
				k.Fatal(err)
			}
			if i == 0 {
				if err := k.Age(k.context(), key, 2*time.Hour); err != nil {
					k.Fatal(err)
				}
			}
		}
		k.wantPass(time.Hour, inbox.CleanerPass{Unsent: 1})
	}},
	{"effects stay when their record goes", func(k *kit) {
		key := k.key()
		k.process(key, "effect")
		if err := k.Age(k.context(), key, 2*time.Hour); err != nil {
			k.Fatal(err)
		}
		k.wantPass(time.Hour, inbox.CleanerPass{Deleted: 1})
		k.wantEffects("effect")
	}},
	{"an ended context deletes nothing", func(k *kit) {
		key := k.key()
		k.process(key, "effect")
		if err := k.Age(k.context(), key, 2*time.Hour); err != nil {
			k.Fatal(err)
		}
		ctx, cancel := context.WithCancel(k.context())
		cancel()
		if pass, err := k.cleaner(time.Hour).Pass(ctx); err == nil || pass.Deleted != 0 {
			k.Fatalf("pass %+v, %v, want an error", pass, err)
		}
		k.wantProcessed(key)
	}},
	{"Run ends with its context", func(k *kit) {
		ctx, cancel := context.WithCancel(k.context())
		done := make(chan error, 1)
		go func() { done <- k.cleaner(time.Hour).Run(ctx) }()
		cancel()
		select {
		case err := <-done:
			if err != context.Canceled {
				k.Fatalf("Run returned %v", err)
			}
		case <-time.After(patience):
			k.Fatal("Run did not return")
		}
	}},
}

// cleaner makes batches of two, so that a handful of records takes several.
func (k *kit) cleaner(retention time.Duration) *inbox.Cleaner {
	k.Helper()
	cleaner, err := inbox.NewCleaner(k.Repository, inbox.CleanerOptions{Retention: retention, BatchSize: 2, BatchPause: time.Millisecond})
	if err != nil {
		k.Fatal(err)
	}
	return cleaner
}

func (k *kit) wantPass(retention time.Duration, want inbox.CleanerPass) {
	k.Helper()
	got, err := k.cleaner(retention).Pass(k.context())
	if err != nil || got != want {
		k.Fatalf("pass %+v, %v, want %+v", got, err, want)
	}
}
