package inboxtest

import (
	"context"
	"errors"
	"sync"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// Two consumers hold one message at once: the second waits for the first.
var concurrencyCases = []kitCase{
	{"a copy waits for the first, which commits", copyWaitsForCommit},
	{"a copy waits for the first, which rolls back", copyWaitsForRollback},
	{"a waiting copy gives up when its context ends, and leaves nothing behind", waitingCopyGivesUp},
	{"many copies at once have one effect", manyCopiesOfOneMessage},
	{"another message does not wait", otherMessageDoesNotWait},
	{"many messages with copies at once have one effect each", manyCopiesOfManyMessages},
}

func copyWaitsForCommit(k *kit) {
	key := k.key()
	first := k.claim(k.context(), key)
	second := k.claimLater(k.context(), key)
	second.wantWaiting(k)
	if err := first.Commit(k.context()); err != nil {
		k.Fatal(err)
	}
	got := second.wait(k)
	if k.features.WaitingCopyFails {
		// Under REPEATABLE READ and SERIALIZABLE the claim that waited fails with 40001. On a slow machine the claim may
		// begin after the commit; then it is a plain duplicate.
		if got.err == nil && got.record == nil {
			k.Fatal("the copy got the claim")
		}
		if got.err != nil && inbox.ShouldPoison(&inbox.Error{Step: "claim", Err: got.err}) {
			k.Fatalf("the copy's error would be poisoned: %v", got.err)
		}
	} else if got.err != nil || got.record == nil {
		k.Fatalf("the copy got record %v and error %v, want the record", got.record, got.err)
	}
	k.wantProcessed(key)
}

func copyWaitsForRollback(k *kit) {
	key := k.key()
	first := k.claim(k.context(), key)
	second := k.claimLater(k.context(), key)
	second.wantWaiting(k)
	if err := first.Rollback(); err != nil {
		k.Fatal(err)
	}
	got := second.wait(k)
	if got.err != nil || got.record != nil {
		k.Fatalf("the copy got record %v and error %v, want the claim", got.record, got.err)
	}
	if err := got.transaction.Commit(k.context()); err != nil {
		k.Fatal(err)
	}
	k.wantProcessed(key)
}

func waitingCopyGivesUp(k *kit) {
	key := k.key()
	first := k.claim(k.context(), key)
	ctx, cancel := context.WithCancel(k.context())
	second := k.claimLater(ctx, key)
	second.wantWaiting(k)
	cancel()
	if got := second.wait(k); got.err == nil {
		k.Fatal("the copy got no error")
	}
	if err := first.Commit(k.context()); err != nil {
		k.Fatal(err)
	}
	k.wantProcessed(key)
}

func manyCopiesOfOneMessage(k *kit) {
	key := k.key()
	var group sync.WaitGroup
	for range 8 {
		group.Add(1)
		go func() {
			defer group.Done()
			k.untilDone(key, "effect")
		}()
	}
	group.Wait()
	k.wantEffects("effect")
}

func otherMessageDoesNotWait(k *kit) {
	if k.features.OneWriter {
		return // it does, by the nature of the database
	}
	transaction := k.claim(k.context(), k.key())
	k.process(k.key(), "other")
	k.wantEffects("other")
	if err := transaction.Commit(k.context()); err != nil {
		k.Fatal(err)
	}
}

func manyCopiesOfManyMessages(k *kit) {
	keys, want := make([]inbox.Key, 10), []string(nil)
	for i := range keys {
		keys[i] = k.key()
		want = append(want, keys[i].MessageID)
	}
	var group sync.WaitGroup
	for range 4 {
		group.Add(1)
		go func() {
			defer group.Done()
			for _, key := range keys {
				k.untilDone(key, key.MessageID)
			}
		}()
	}
	group.Wait()
	k.wantEffects(want...)
}

// untilDone behaves as a consumer under a retry: errors are tried again until the key is processed.
// It is called by goroutines.
func (k *kit) untilDone(key inbox.Key, effect string) {
	ctx := k.context()
	var last error
	for ctx.Err() == nil {
		transaction, record, err := k.Repository.Claim(ctx, inbox.ClaimParams{Key: key})
		if err != nil {
			last = err
			continue
		}
		if record != nil {
			return
		}
		if last = k.Write(inbox.ContextWithTransaction(ctx, transaction), effect); last == nil {
			last = transaction.Commit(ctx)
		}
		if last == nil {
			return
		}
		_ = transaction.Rollback()
	}
	k.Errorf("%s was not processed: %v", key, errors.Join(ctx.Err(), last))
}

// laterClaim is a claim in another goroutine.
type laterClaim struct {
	transaction inbox.Transaction
	record      *inbox.Record
	err         error
	done        chan struct{}
}

func (k *kit) claimLater(ctx context.Context, key inbox.Key) *laterClaim {
	l := &laterClaim{done: make(chan struct{})}
	go func() {
		defer close(l.done)
		l.transaction, l.record, l.err = k.Repository.Claim(ctx, inbox.ClaimParams{Key: key})
	}()
	k.Cleanup(func() {
		<-l.done
		if l.transaction != nil {
			_ = l.transaction.Rollback()
		}
	})
	return l
}

// wantWaiting fails the test if the claim comes back although it should wait. There is no signal for
// "still waiting", so it looks for a while.
func (l *laterClaim) wantWaiting(k *kit) {
	k.Helper()
	select {
	case <-l.done:
		k.Fatalf("the copy did not wait: record %v, error %v", l.record, l.err)
	case <-time.After(300 * time.Millisecond):
	}
}

func (l *laterClaim) wait(k *kit) *laterClaim {
	k.Helper()
	select {
	case <-l.done:
	case <-time.After(patience):
		k.Fatal("the copy still waits")
	}
	return l
}
