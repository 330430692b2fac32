package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
)

// The outcome table, row by row, with the middleware in a real router. Rows about produced messages are in
// produced_cases.go, rows about failing steps in fault_cases.go.
var outcomeCases = []kitCase{
	{"first delivery, then copies", firstDeliveryThenCopies},
	{"the handler finds its key and the transaction, and nobody does afterwards", handlerFindsKeyAndTransaction},
	{"copy while the first runs, which commits", copyWhileFirstCommits},
	{"copy while the first runs, which fails", copyWhileFirstFails},
	{"copy while the first runs, longer than the claim timeout", copyWaitsLongerThanClaimTimeout},
	{"invalid message ids", invalidMessageIDs},
	{"invalid consumer names", invalidConsumerNames},
	{"handler error", handlerReturnsError},
	{"handler panic", handlerPanics},
	{"handler Goexit", handlerEndsItsGoroutine},
	{"handler goes on after a failed statement", handlerContinuesAfterFailedStatement},
	{"handler commits by itself", handlerCommitsByItself},
	{"handler rolls back by itself", handlerRollsBackByItself},
	{"context cancelled before the commit", contextCancelledBeforeCommit},
	{"context past its deadline before the commit", deadlinePassesBeforeCommit},
	{"context cancelled around the commit, many times", contextCancelledAroundCommit},
	{"permanent errors", handlerReturnsPermanentError},
}

func firstDeliveryThenCopies(k *kit) {
	var runs atomic.Int32
	d := k.deliver(k.Repository, inbox.Options{}, false, k.effect(&runs))
	key := k.key()
	for range 4 {
		d.want(acked, key)
	}
	k.wantRuns(&runs, 1)
	k.wantEffects(key.MessageID)
}

func handlerFindsKeyAndTransaction(k *kit) {
	key := k.key()
	var kept context.Context
	d := k.deliver(k.Repository, inbox.Options{}, false, func(msg *message.Message) ([]*message.Message, error) {
		kept = msg.Context()
		if got, ok := inbox.KeyFromContext(kept); !ok || got != key {
			return nil, fmt.Errorf("key in the context is %v, %v, want %v", got, ok, key)
		}
		if !k.HasTransaction(kept) {
			return nil, errors.New("no transaction in the context")
		}
		return nil, nil
	})
	d.want(acked, key)
	if k.HasTransaction(kept) {
		k.Fatal("the transaction is still found in the context after the commit")
	}
	if got, ok := inbox.KeyFromContext(kept); !ok || got != key {
		k.Fatalf("the key is gone from the context: %v, %v", got, ok)
	}
}

func copyWhileFirstCommits(k *kit) {
	k.copyWhileFirstRuns(nil, 1)
}

func copyWhileFirstFails(k *kit) {
	k.copyWhileFirstRuns(errors.New("the first fails"), 2)
}

// A handler that hangs must not make its copies hang, nor the message that comes next.
func copyWaitsLongerThanClaimTimeout(k *kit) {
	var runs atomic.Int32
	entered, leave := make(chan struct{}), make(chan struct{})
	d := k.deliver(k.Repository, inbox.Options{ClaimTimeout: time.Second}, false, func(msg *message.Message) ([]*message.Message, error) {
		if runs.Add(1) == 1 {
			close(entered)
			<-leave
		}
		return nil, k.Write(msg.Context(), msg.UUID)
	})
	key := k.key()
	first := d.start(key, k.context())
	<-entered
	d.want(nacked, key)
	err := d.lastError()
	if !errors.Is(err, inbox.ErrInFlight) {
		k.Fatalf("the copy's error is %v, want it to match ErrInFlight", err)
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		k.Fatalf("the copy's error matches a context error, which the router would hide: %v", err)
	}
	k.wantNotPoisoned(err)
	close(leave)
	if got := d.wait(first); got != acked {
		k.Fatalf("the first was %s: %v", got, d.allErrors())
	}
	d.want(acked, key)
	k.wantRuns(&runs, 1)
	other := k.key()
	d.want(acked, other)
	k.wantEffects(key.MessageID, other.MessageID)
}

// Unrelated messages of producers that set no id share the empty one. An index refuses a long id, and PostgreSQL
// refuses NUL and invalid UTF-8, on every redelivery. So the id is refused before the database is asked.
func invalidMessageIDs(k *kit) {
	var runs atomic.Int32
	untouched := NewFaultRepository(k.Repository, func(point FaultPoint, key inbox.Key) error {
		k.Errorf("the repository was called (%s) for %s", point, key)
		return nil
	})
	d := k.deliver(untouched, inbox.Options{}, false, k.effect(&runs))
	for _, id := range []string{
		"", "a\x00b", "\x00", "\xff\xfe", "\xed\xa0\x80", // the last one is a lone surrogate
		strings.Repeat("x", maxKeyBytes+1), strings.Repeat("x", 300), strings.Repeat("x", 54000), strings.Repeat("🙂", 64),
	} {
		d.want(nacked, inbox.Key{MessageID: id})
		k.wantInvalid(d.lastError(), "message id")
	}
	k.wantRuns(&runs, 0)
	good := k.deliver(k.Repository, inbox.Options{}, false, k.effect(&runs))
	key := k.key()
	good.want(acked, key)
	k.wantEffects(key.MessageID)
}

func invalidConsumerNames(k *kit) {
	for _, name := range []string{"", "a\x00b", "\xff\xfe", strings.Repeat("x", maxKeyBytes+1)} {
		var runs atomic.Int32
		d := k.deliver(k.Repository, inbox.Options{Consumer: func(string) string { return name }}, false, k.effect(&runs))
		d.want(nacked, k.key())
		k.wantInvalid(d.lastError(), "consumer")
		k.wantRuns(&runs, 0)
	}
}

func handlerReturnsError(k *kit) {
	var runs atomic.Int32
	failure := errors.New("no funds")
	d := k.deliver(k.Repository, inbox.Options{}, false, func(msg *message.Message) ([]*message.Message, error) {
		if err := k.Write(msg.Context(), msg.UUID); err != nil {
			return nil, err
		}
		if runs.Add(1) == 1 {
			return nil, failure
		}
		return nil, nil
	})
	key := k.key()
	d.want(nacked, key)
	if err := d.lastError(); err != failure {
		k.Fatalf("the error is %v, want the handler's own, unchanged", err)
	}
	k.wantEffects()
	d.want(acked, key)
	k.wantEffects(key.MessageID)
}

// A panic is rolled back. The value itself travels on, not a copy in an error.
func handlerPanics(k *kit) {
	for _, value := range []any{"boom", errors.New("boom"), 42, nil} {
		var recovered any
		panics := true
		d := k.deliver(k.Repository, inbox.Options{}, false, func(msg *message.Message) ([]*message.Message, error) {
			if err := k.Write(msg.Context(), msg.UUID); err != nil {
				return nil, err
			}
			if panics {
				panic(value)
			}
			return nil, nil
		})
		m, err := inbox.NewMiddleware(k.Repository, inbox.Options{Consumer: func(string) string { return consumer }})
		if err != nil {
			k.Fatal(err)
		}
		key := k.key()
		func() {
			defer func() { recovered = recover() }()
			msg := message.NewMessage(key.MessageID, nil)
			_, err := m.Middleware(func(*message.Message) ([]*message.Message, error) { panic(value) })(msg)
			k.Errorf("the panic came back as %v", err)
		}()
		var nilPanic *runtime.PanicNilError
		if err, _ := recovered.(error); recovered != value && !errors.As(err, &nilPanic) {
			k.Fatalf("recovered %v, want %v", recovered, value)
		}
		d.want(nacked, key)
		panics = false
		d.want(acked, key)
	}
}

func handlerEndsItsGoroutine(k *kit) {
	key := k.key()
	exits := true
	entered := make(chan struct{})
	var kept context.Context
	d := k.deliver(k.Repository, inbox.Options{}, false, func(msg *message.Message) ([]*message.Message, error) {
		kept = msg.Context()
		if err := k.Write(msg.Context(), msg.UUID); err != nil {
			return nil, err
		}
		if exits {
			exits = false
			close(entered)
			runtime.Goexit()
		}
		return nil, nil
	})
	first := d.start(key, k.context())
	<-entered
	d.want(acked, key) // it waits for the rollback
	select {
	case <-first.Acked():
		k.Fatal("the first was acked")
	case <-first.Nacked():
		k.Fatal("the first was nacked")
	default:
	}
	if k.HasTransaction(kept) {
		k.Fatal("the transaction is still found in the context")
	}
	k.wantEffects(key.MessageID)
}

func handlerContinuesAfterFailedStatement(k *kit) {
	if !k.features.FailedStatementBreaksTransaction {
		return
	}
	fails := true
	d := k.deliver(k.Repository, inbox.Options{}, false, func(msg *message.Message) ([]*message.Message, error) {
		err := k.Write(msg.Context(), msg.UUID)
		if fails {
			if k.FailStatement(msg.Context()) == nil {
				return nil, errors.New("the statement did not fail")
			}
		}
		return nil, err
	})
	key := k.key()
	d.want(nacked, key)
	k.wantBroken(d.lastError())
	k.wantEffects()
	fails = false
	d.want(acked, key)
	k.wantEffects(key.MessageID)
}

func handlerCommitsByItself(k *kit) {
	if k.End == nil {
		return
	}
	d := k.deliver(k.Repository, inbox.Options{}, false, func(msg *message.Message) ([]*message.Message, error) {
		if err := k.Write(msg.Context(), msg.UUID); err != nil {
			return nil, err
		}
		return nil, k.End(msg.Context())
	})
	key := k.key()
	d.want(nacked, key)
	k.wantBroken(d.lastError())
	// What it did stays: the effect, and the claim with it.
	k.wantEffects(key.MessageID)
	d.want(acked, key)
	k.wantEffects(key.MessageID)
}

func handlerRollsBackByItself(k *kit) {
	if k.Abandon == nil {
		return
	}
	abandons := true
	d := k.deliver(k.Repository, inbox.Options{}, false, func(msg *message.Message) ([]*message.Message, error) {
		err := k.Write(msg.Context(), msg.UUID)
		if abandons {
			return nil, errors.Join(err, k.Abandon(msg.Context()))
		}
		return nil, err
	})
	key := k.key()
	d.want(nacked, key)
	k.wantBroken(d.lastError())
	k.wantEffects()
	abandons = false
	d.want(acked, key)
	k.wantEffects(key.MessageID)
}

// The handler does not look at its context and returns nil.
func contextCancelledBeforeCommit(k *kit) {
	key := k.key()
	ctx, cancel := context.WithCancel(k.context())
	logger := newCapture()
	d := k.deliver(k.Repository, inbox.Options{Logger: logger}, false, func(msg *message.Message) ([]*message.Message, error) {
		err := k.Write(msg.Context(), msg.UUID)
		cancel()
		return nil, err
	})
	if got := d.send(key, ctx); got != nacked {
		k.Fatalf("the message was %s", got)
	}
	err := d.lastError()
	if !errors.Is(err, context.Canceled) {
		k.Fatalf("the error is %v, want it to match context.Canceled", err)
	}
	k.wantNotPoisoned(err)
	if lines := logger.errors(); len(lines) != 1 || !strings.Contains(lines[0], key.MessageID) {
		k.Fatalf("error lines are %q, want one with the key, since the router logs none", lines)
	}
	k.wantEffects()
	d.want(acked, key)
	k.wantEffects(key.MessageID)
}

func deadlinePassesBeforeCommit(k *kit) {
	key := k.key()
	ctx, cancel := context.WithTimeout(k.context(), 300*time.Millisecond)
	defer cancel()
	d := k.deliver(k.Repository, inbox.Options{}, false, func(msg *message.Message) ([]*message.Message, error) {
		err := k.Write(msg.Context(), msg.UUID)
		if _, limited := ctx.Deadline(); limited && ctx.Err() == nil {
			<-ctx.Done()
		}
		return nil, err
	})
	if got := d.send(key, ctx); got != nacked {
		k.Fatalf("the message was %s", got)
	}
	if err := d.lastError(); !errors.Is(err, context.DeadlineExceeded) {
		k.Fatalf("the error is %v, want it to match context.DeadlineExceeded", err)
	}
	k.wantEffects()
	d.want(acked, key)
	k.wantEffects(key.MessageID)
}

// The end of the context races the commit. Whichever wins, an ack means committed, and the next message is fine.
func contextCancelledAroundCommit(k *kit) {
	const rounds = 100
	var want []string
	for range rounds {
		key := k.key()
		ctx, cancel := context.WithCancel(k.context())
		d := k.middleware(func(msg *message.Message) ([]*message.Message, error) {
			err := k.Write(msg.Context(), msg.UUID)
			go cancel()
			return nil, err
		})
		msg := message.NewMessageWithContext(ctx, key.MessageID, nil)
		if _, err := d(msg); err == nil {
			want = append(want, key.MessageID)
		} else if !errors.Is(err, context.Canceled) {
			k.Fatalf("the error is %v, want it to match context.Canceled", err)
		}
		cancel()
		next := k.key()
		if _, err := k.middleware(func(msg *message.Message) ([]*message.Message, error) {
			return nil, k.Write(msg.Context(), msg.UUID)
		})(message.NewMessage(next.MessageID, nil)); err != nil {
			k.Fatalf("the message after a cancelled one failed: %v", err)
		}
		want = append(want, next.MessageID)
	}
	got, err := k.Effects(k.context())
	if err != nil {
		k.Fatal(err)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		k.Fatalf("%d effects are committed and %d messages acknowledged", len(got), len(want))
	}
}

func handlerReturnsPermanentError(k *kit) {
	failure := errors.New("unknown currency")
	d := k.deliver(k.Repository, inbox.Options{}, false, func(*message.Message) ([]*message.Message, error) {
		return nil, inbox.Permanent(failure)
	})
	d.want(nacked, k.key())
	if err := d.lastError(); !errors.Is(err, failure) || !inbox.ShouldPoison(err) {
		k.Fatalf("the error %v should match the handler's and be poisoned", err)
	}
}

// middleware returns the handler behind the inbox, without a router.
func (k *kit) middleware(handler message.HandlerFunc) message.HandlerFunc {
	k.Helper()
	m, err := inbox.NewMiddleware(k.Repository, inbox.Options{Consumer: func(string) string { return consumer }})
	if err != nil {
		k.Fatal(err)
	}
	return m.Middleware(handler)
}

func (k *kit) copyWhileFirstRuns(firstFails error, wantRuns int32) {
	k.Helper()
	var runs atomic.Int32
	entered, leave := make(chan struct{}), make(chan struct{})
	d := k.deliver(k.Repository, inbox.Options{}, false, func(msg *message.Message) ([]*message.Message, error) {
		first := runs.Add(1) == 1
		if err := k.Write(msg.Context(), msg.UUID); err != nil {
			return nil, err
		}
		if first {
			close(entered)
			<-leave
			return nil, firstFails
		}
		return nil, nil
	})
	key := k.key()
	first := d.start(key, k.context())
	<-entered
	second := d.start(key, k.context())
	select {
	case <-second.Acked():
		k.Fatal("the copy was acked before the first one's outcome was known")
	case <-second.Nacked():
		k.Fatalf("the copy did not wait: %v", d.allErrors())
	case <-time.After(100 * time.Millisecond):
	}
	close(leave)
	if want, got := map[bool]result{true: acked, false: nacked}[firstFails == nil], d.wait(first); got != want {
		k.Fatalf("the first was %s, want it %s", got, want)
	}
	if d.wait(second) == nacked {
		if !k.features.WaitingCopyFails {
			k.Fatalf("the copy was nacked: %v", d.allErrors())
		}
		k.wantNotPoisoned(d.lastError())
		d.want(acked, key)
	}
	k.wantRuns(&runs, wantRuns)
	k.wantEffects(key.MessageID)
}

func (k *kit) wantInvalid(err error, part string) {
	k.Helper()
	var own *inbox.Error
	if !errors.As(err, &own) || own.Step != "key" || !errors.Is(err, inbox.ErrInvalidKey) || !strings.Contains(err.Error(), part) {
		k.Fatalf("the error is %v, want an *inbox.Error of step key that matches ErrInvalidKey and names the %s", err, part)
	}
	if !inbox.ShouldPoison(err) {
		k.Fatalf("the error is not permanent: %v", err)
	}
}

func (k *kit) wantBroken(err error) {
	k.Helper()
	var own *inbox.Error
	if !errors.As(err, &own) || !errors.Is(err, inbox.ErrTransactionBroken) {
		k.Fatalf("the error is %v, want an *inbox.Error that matches ErrTransactionBroken", err)
	}
	if !inbox.ShouldPoison(err) {
		k.Fatalf("the handler's fault would not be poisoned: %v", err)
	}
}
