package inboxtest_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
)

// world is where the handlers of these tests write: through the transaction, and around it.
type world struct {
	*inboxtest.MemoryRepository
	mutex  sync.Mutex
	around []string
	runs   atomic.Int32
}

func newWorld() *world { return &world{MemoryRepository: inboxtest.NewMemoryRepository()} }

func (w *world) writeAround(effect string) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.around = append(w.around, effect)
}

func (w *world) state(context.Context) (string, error) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return strings.Join(append(w.Effects(), w.around...), ", "), nil
}

// work is what a good handler does.
func (w *world) work(msg *message.Message) error {
	return w.Write(msg.Context(), "work of "+msg.UUID)
}

// transaction is the handler's, as a repository's package would give it.
func transaction(ctx context.Context) inbox.Transaction {
	transaction, _ := inbox.TransactionFromContext[inbox.Transaction](ctx)
	for {
		wrapper, ok := transaction.(interface{ Unwrap() inbox.Transaction })
		if !ok {
			return transaction
		}
		transaction = wrapper.Unwrap()
	}
}

func (w *world) handler(handle message.NoPublishHandlerFunc) inboxtest.Handler {
	return inboxtest.Handler{
		Repository:      w,
		HandleNoPublish: handle,
		Message:         message.NewMessage("payment-7", []byte("payload")),
		State:           w.state,
	}
}

func (w *world) publishingHandler(handle message.HandlerFunc) inboxtest.Handler {
	h := w.handler(nil)
	h.Handle = handle
	return h
}

// events are new messages for each run, with the same payloads.
func events(count int) []*message.Message {
	messages := make([]*message.Message, count)
	for i := range messages {
		messages[i] = message.NewMessage(watermill.NewUUID(), []byte(fmt.Sprint("event ", i)))
		messages[i].Metadata.Set("type", "Booked")
	}
	return messages
}

// outbox writes through the transaction in the message's context.
type outbox struct{ *world }

func (o outbox) Publish(topic string, messages ...*message.Message) error {
	for _, msg := range messages {
		if err := o.Write(msg.Context(), topic+": "+string(msg.Payload)); err != nil {
			return err
		}
	}
	return nil
}

func (outbox) Close() error { return nil }

func TestHandlerGood(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		handler func(w *world) inboxtest.Handler
		faults  int // besides those that every handler meets
	}{
		"without messages": {func(w *world) inboxtest.Handler { return w.handler(w.work) }, 0},
		"no messages returned": {func(w *world) inboxtest.Handler {
			return w.publishingHandler(func(msg *message.Message) ([]*message.Message, error) { return nil, w.work(msg) })
		}, 0},
		"one message": {func(w *world) inboxtest.Handler {
			return w.publishingHandler(func(msg *message.Message) ([]*message.Message, error) { return events(1), w.work(msg) })
		}, 2 + 2},
		"several messages": {func(w *world) inboxtest.Handler {
			return w.publishingHandler(func(msg *message.Message) ([]*message.Message, error) { return events(3), w.work(msg) })
		}, 2 + 4},
		"many messages": {func(w *world) inboxtest.Handler {
			return w.publishingHandler(func(msg *message.Message) ([]*message.Message, error) { return events(50), w.work(msg) })
		}, 2 + 5},
		"messages alone": {func(w *world) inboxtest.Handler {
			return w.publishingHandler(func(*message.Message) ([]*message.Message, error) { return events(1), nil })
		}, 2 + 2},
		"the message passed on": {func(w *world) inboxtest.Handler {
			return w.publishingHandler(func(msg *message.Message) ([]*message.Message, error) {
				return []*message.Message{msg}, w.work(msg)
			})
		}, 2 + 2},
		"a random payload": {func(w *world) inboxtest.Handler {
			h := w.publishingHandler(func(msg *message.Message) ([]*message.Message, error) {
				return []*message.Message{message.NewMessage("", []byte(watermill.NewUUID()))}, w.work(msg)
			})
			h.Describe = func(msg *message.Message) string { return fmt.Sprint(len(msg.Payload)) }
			return h
		}, 2 + 2},
		"an outbox": {func(w *world) inboxtest.Handler {
			h := w.publishingHandler(func(*message.Message) ([]*message.Message, error) { return events(2), nil })
			h.Options.Outbox = outbox{w}
			h.PublishTopic = "booked"
			return h
		}, 0},
		"another id": {func(w *world) inboxtest.Handler {
			h := w.handler(w.work)
			h.Message.UUID = ""
			h.Message.Metadata.Set("order", "1")
			h.Options.MessageID = inbox.MessageIDFromMetadata("order")
			return h
		}, 0},
		"copies that waited fail": {func(w *world) inboxtest.Handler {
			h := w.handler(w.work)
			h.Repository = impatient{w}
			return h
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const everyHandler = 16 // faults, with the run without
			calls := 0
			inboxtest.TestHandler(t, func(*testing.T) inboxtest.Handler {
				calls++
				return tc.handler(newWorld())
			})
			if want := everyHandler + tc.faults; calls != want {
				t.Errorf("the handler met %d faults, want %d", calls, want)
			}
		})
	}
}

// impatient fails a claim that would wait, as a database does that has waited long enough.
type impatient struct{ inbox.Repository }

func (i impatient) Claim(ctx context.Context, params inbox.ClaimParams) (inbox.Transaction, *inbox.Record, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(50*time.Millisecond, func() { cancel(errors.New("could not serialize access")) })
	transaction, record, err := i.Repository.Claim(ctx, params)
	if err == nil && !timer.Stop() {
		err = errors.Join(context.Cause(ctx), transaction.Rollback())
	}
	return transaction, record, err
}

func TestHandlerBad(t *testing.T) {
	t.Parallel()
	const (
		around    = "writes around its transaction"
		behind    = "a goroutine that the handler left behind"
		remembers = "something that a rollback does not undo"
	)
	plain := func(handle func(w *world, msg *message.Message) error) func(w *world) inboxtest.Handler {
		return func(w *world) inboxtest.Handler {
			return w.handler(func(msg *message.Message) error { return handle(w, msg) })
		}
	}
	for name, tc := range map[string]struct {
		handler func(w *world) inboxtest.Handler
		want    []string // in one of the failures
	}{
		"writes around the transaction": {
			plain(func(w *world, msg *message.Message) error {
				w.writeAround(msg.UUID)
				return w.work(msg)
			}),
			[]string{
				"the handler returns an error after its work: the state has changed although the transaction was rolled back",
				`state expected: ""`, `state seen:     "payment-7"`, around, "TxFromContext",
			},
		},
		"writes around the transaction alone": {
			plain(func(w *world, msg *message.Message) error {
				w.writeAround(msg.UUID)
				return nil
			}),
			[]string{"the commit fails: the state has changed", around},
		},
		"writes around the transaction when that fails": {
			plain(func(w *world, msg *message.Message) error {
				if w.work(msg) != nil {
					w.writeAround("work of " + msg.UUID)
				}
				return nil
			}),
			[]string{"the transaction is lost before the work: the state has changed", around},
		},
		"waits for itself": {
			func(w *world) inboxtest.Handler {
				h := w.handler(func(msg *message.Message) error {
					<-msg.Context().Done()
					return msg.Context().Err()
				})
				h.Timeout = 500 * time.Millisecond
				return h
			},
			[]string{"no fault: the message is not acknowledged", "deadline exceeded", around, "Handler.Timeout"},
		},
		"waits for itself, and then writes": {
			func(w *world) inboxtest.Handler {
				h := w.handler(func(msg *message.Message) error {
					<-msg.Context().Done()
					w.writeAround(msg.UUID)
					return nil
				})
				h.Timeout = 500 * time.Millisecond
				return h
			},
			[]string{"no fault: the message is not acknowledged, and yet the state has changed", around},
		},
		"does not look at its context": {
			func(w *world) inboxtest.Handler {
				h := w.handler(func(*message.Message) error {
					time.Sleep(time.Second)
					return nil
				})
				h.Timeout = 100 * time.Millisecond
				return h
			},
			[]string{"no fault: the handler has not returned 100ms after the end of its context", "pass msg.Context()"},
		},
		"refuses the message": {
			plain(func(*world, *message.Message) error { return errors.New("unknown account") }),
			[]string{"no fault: the message is not acknowledged", "unknown account", "make the message and the state fit"},
		},
		"panics": {
			plain(func(*world, *message.Message) error { panic("boom") }),
			[]string{"no fault: the message is not acknowledged", "panic: boom", "handler_test.go"},
		},
		"ends its goroutine": {
			plain(func(*world, *message.Message) error {
				runtime.Goexit()
				return nil
			}),
			[]string{"no fault: the message is not acknowledged", "neither acked nor nacked", "t.Fatal"},
		},
		"commits": {
			plain(func(w *world, msg *message.Message) error {
				return errors.Join(w.work(msg), w.EndTransaction(msg.Context(), true))
			}),
			[]string{"no fault: the message is not acknowledged, and yet the state has changed", "commits its transaction itself", "leave Commit and Rollback"},
		},
		"commits and returns an error": {
			plain(func(w *world, msg *message.Message) error {
				return errors.Join(w.work(msg), w.EndTransaction(msg.Context(), true), errors.New("too late"))
			}),
			[]string{"no fault: the message is not acknowledged, and yet the state has changed", "too late", "commits its transaction itself"},
		},
		"rolls back": {
			plain(func(w *world, msg *message.Message) error {
				return errors.Join(w.work(msg), w.EndTransaction(msg.Context(), false))
			}),
			[]string{"no fault: the message is not acknowledged", inbox.ErrTransactionBroken.Error(), "ended its transaction itself"},
		},
		"uses the transaction after it has returned": {
			plain(func(w *world, msg *message.Message) error {
				kept := inbox.ContextWithTransaction(context.Background(), transaction(msg.Context()))
				go func() {
					time.Sleep(100 * time.Millisecond)
					_ = w.Write(kept, "late")
				}()
				return w.work(msg)
			}),
			[]string{"the commit comes late: in the end the state is not the one", `"work of payment-7, late"`, behind, "wait for every goroutine"},
		},
		"writes around the transaction after it has returned": {
			plain(func(w *world, msg *message.Message) error {
				go func() {
					time.Sleep(100 * time.Millisecond)
					w.writeAround("late")
				}()
				return w.work(msg)
			}),
			[]string{"a while later: the state has changed after the message was acknowledged", behind},
		},
		"counts in a variable": {
			plain(func(w *world, msg *message.Message) error {
				return w.Write(msg.Context(), fmt.Sprint("work ", w.runs.Add(1)))
			}),
			[]string{"the handler panics after its work: in the end the state is not the one", `"work 1"`, `"work 2"`, remembers},
		},
		"remembers the message in a variable": {
			plain(func(w *world, msg *message.Message) error {
				if w.runs.Add(1) > 1 {
					return nil
				}
				return w.work(msg)
			}),
			[]string{"the handler ends its goroutine after its work: in the end the state is not the one", `state seen:     ""`, remembers},
		},
		"changes the message": {
			func(w *world) inboxtest.Handler {
				return w.publishingHandler(func(msg *message.Message) ([]*message.Message, error) {
					msg.Payload[0]++
					return []*message.Message{msg}, w.work(msg)
				})
			},
			[]string{"and Retry calls it again: in the end the published messages are not those", "qayload", "rayload", "msg.Copy()"},
		},
		"takes the message apart": {
			plain(func(w *world, msg *message.Message) error {
				if msg.Payload[0] == 0 {
					return errors.New("no payload")
				}
				msg.Payload[0] = 0 // in the delivered bytes; what is assigned to the message's fields is put back
				return w.work(msg)
			}),
			[]string{"and Retry calls it again: the second attempt failed", "no payload", "must not change it"},
		},
		"refuses the redelivery": {
			plain(func(w *world, msg *message.Message) error {
				if w.runs.Add(1) > 1 {
					return errors.New("seen before")
				}
				return w.work(msg)
			}),
			[]string{"the context is cancelled after the work: the redelivered message is not acknowledged", "seen before"},
		},
		"returns another message on each run": {
			func(w *world) inboxtest.Handler {
				return w.publishingHandler(func(msg *message.Message) ([]*message.Message, error) {
					return events(int(w.runs.Add(1))), w.work(msg)
				})
			},
			[]string{"the store of the messages fails: in the end the published messages are not those", remembers},
		},
		"writes what no two runs share": {
			plain(func(w *world, msg *message.Message) error { return w.Write(msg.Context(), watermill.NewUUID()) }),
			[]string{"no fault, once more from the start", "in the end the state is not the one", "let State and Describe leave that out"},
		},
		"publishes what no two runs share": {
			func(w *world) inboxtest.Handler {
				return w.publishingHandler(func(msg *message.Message) ([]*message.Message, error) {
					return []*message.Message{message.NewMessage("1", []byte(watermill.NewUUID()))}, w.work(msg)
				})
			},
			[]string{"no fault, once more from the start", "in the end the published messages are not those", "let State and Describe leave that out"},
		},
		"ignores errors": {
			plain(func(w *world, msg *message.Message) error {
				_ = w.work(msg)
				return nil
			}),
			[]string{"the transaction is lost before the work: the handler returned nil", "return the error of every statement"},
		},
		"acks": {
			plain(func(w *world, msg *message.Message) error {
				msg.Ack()
				return w.work(msg)
			}),
			[]string{"no fault: the message was acked by the handler itself", "return nil or an error"},
		},
		"nacks": {
			plain(func(w *world, msg *message.Message) error {
				msg.Nack()
				return w.work(msg)
			}),
			[]string{"no fault: the message was nacked by the handler itself"},
		},
		"gives its messages one UUID": {
			func(w *world) inboxtest.Handler {
				return w.publishingHandler(func(msg *message.Message) ([]*message.Message, error) {
					return []*message.Message{message.NewMessage(msg.UUID, nil), message.NewMessage(msg.UUID, nil)}, w.work(msg)
				})
			},
			[]string{`no fault: two of the 2 messages that the handler returned have the UUID "payment-7"`},
		},
		"State sees nothing": {
			func(w *world) inboxtest.Handler {
				h := w.handler(w.work)
				h.State = func(context.Context) (string, error) { return "always the same", nil }
				return h
			},
			[]string{"no fault: State does not see what the handler writes", "always the same"},
		},
		"State fails": {
			func(w *world) inboxtest.Handler {
				h := w.handler(w.work)
				h.State = func(context.Context) (string, error) { return "", errors.New("no such table") }
				return h
			},
			[]string{"no fault: State failed: no such table"},
		},
		"a message without an id": {
			func(w *world) inboxtest.Handler {
				h := w.handler(w.work)
				h.Message.UUID = ""
				return h
			},
			[]string{"no fault: the message is not acknowledged", "give Handler.Message a UUID"},
		},
		"another id for each copy": {
			func(w *world) inboxtest.Handler {
				h := w.handler(w.work)
				h.Options.MessageID = func(*message.Message) string { return watermill.NewUUID() }
				return h
			},
			[]string{"a copy while the first is handled: copies of the message were claimed under different keys", "Options.MessageID"},
		},
		"a repository that fails": {
			func(w *world) inboxtest.Handler {
				h := w.handler(w.work)
				h.Repository = inboxtest.NewFaultRepository(w, func(inboxtest.FaultPoint, inbox.Key) error { return errors.New("no such table") })
				return h
			},
			[]string{"no fault: the message is not acknowledged", "no such table", "the repository or the outbox failed"},
		},
		"a repository without a free connection": {
			func(w *world) inboxtest.Handler {
				h := w.handler(w.work)
				h.Repository = inboxtest.NewFaultRepository(w, func(inboxtest.FaultPoint, inbox.Key) error { return context.DeadlineExceeded })
				return h
			},
			[]string{"no fault: the message is not acknowledged", "the constructor or State have left open"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			failures := inboxtest.CheckHandler(t, func(*testing.T) inboxtest.Handler { return tc.handler(newWorld()) })
			wantFailure(t, failures, tc.want...)
		})
	}
}

func TestHandlerNotFresh(t *testing.T) {
	t.Parallel()
	w := newWorld()
	failures := inboxtest.CheckHandler(t, func(*testing.T) inboxtest.Handler {
		h := w.handler(w.work)
		h.Message.UUID = watermill.NewUUID()
		return h
	})
	wantFailure(t, failures, "the state before the message is not the one of the run without a fault", "make a schema, a file or a table of its own")
}

// The claim is gone, and with it what keeps the copies from running.
func TestHandlerWithoutClaim(t *testing.T) {
	t.Parallel()
	failures := inboxtest.CheckHandler(t, func(*testing.T) inboxtest.Handler {
		w := newWorld()
		h := w.handler(func(msg *message.Message) error {
			w.writeAround("work") // stands for a second transaction on the connection
			return nil
		})
		h.Repository = forgetful{w}
		return h
	})
	wantFailure(t, failures, "a copy afterwards: the handler ran 2 times, although its first run was committed", "replaced its transaction")
	wantFailure(t, failures, "a copy while the first is handled: in the end the state", `"work, work"`, "both copies had their effect")
}

// forgetful loses every claim with the commit.
type forgetful struct{ inbox.Repository }

func (f forgetful) Claim(ctx context.Context, params inbox.ClaimParams) (inbox.Transaction, *inbox.Record, error) {
	transaction, record, err := f.Repository.Claim(ctx, params)
	if err == nil {
		err = transaction.Rollback()
	}
	return rolledBack{transaction}, record, err
}

type rolledBack struct{ inbox.Transaction }

func (rolledBack) Commit(context.Context) error { return nil }

// Without a store a redelivery publishes nothing, so that what is seen is what the failing publish sent.
func TestHandlerPublishFails(t *testing.T) {
	t.Parallel()
	failures := inboxtest.CheckHandler(t, func(*testing.T) inboxtest.Handler {
		w := newWorld()
		h := w.publishingHandler(func(msg *message.Message) ([]*message.Message, error) { return events(2), w.work(msg) })
		h.Repository = withoutStore{w}
		h.Describe = func(msg *message.Message) string { return string(msg.Payload) }
		return h
	})
	wantFailure(t, failures, "the publish fails after 0 of 2 messages: in the end the published messages", "seen:     []")
	wantFailure(t, failures, "the publish fails after 1 of 2 messages: in the end the published messages", `seen:     ["event 0"]`)
	for _, failure := range failures {
		if strings.Contains(failure.Error(), "after 2 of 2 messages") {
			t.Error(failure)
		}
	}
}

// withoutStore forgets the produced messages.
type withoutStore struct{ inbox.Repository }

func (s withoutStore) Claim(ctx context.Context, params inbox.ClaimParams) (inbox.Transaction, *inbox.Record, error) {
	transaction, record, err := s.Repository.Claim(ctx, params)
	if transaction == nil {
		return nil, record, err
	}
	return forgetting{transaction}, nil, nil
}

type forgetting struct{ inbox.Transaction }

func (f forgetting) Unwrap() inbox.Transaction { return f.Transaction }

func (forgetting) Store(context.Context, inbox.StoreParams) (time.Time, error) {
	return time.Time{}, nil
}

func TestHandlerIncomplete(t *testing.T) {
	t.Parallel()
	for field, remove := range map[string]func(*inboxtest.Handler){
		"Handler.Repository is missing":                           func(h *inboxtest.Handler) { h.Repository = nil },
		"Handler.Handle and Handler.HandleNoPublish are missing":  func(h *inboxtest.Handler) { h.HandleNoPublish = nil },
		"Handler.Handle and Handler.HandleNoPublish are both set": func(h *inboxtest.Handler) { h.Handle = message.PassthroughHandler },
		"Handler.Message is missing":                              func(h *inboxtest.Handler) { h.Message = nil },
		"Handler.State is missing":                                func(h *inboxtest.Handler) { h.State = nil },
		"Handler.Timeout is negative":                             func(h *inboxtest.Handler) { h.Timeout = -1 },
		"ClaimTimeout is negative":                                func(h *inboxtest.Handler) { h.Options.ClaimTimeout = -1 },
	} {
		calls := 0
		failures := inboxtest.CheckHandler(t, func(*testing.T) inboxtest.Handler {
			calls++
			w := newWorld()
			h := w.handler(w.work)
			remove(&h)
			return h
		})
		wantFailure(t, failures, field)
		if len(failures) != 1 || calls != 1 {
			t.Errorf("%s: %d failures of %d handlers, want one", field, len(failures), calls)
		}
	}
}

// wantFailure fails the test unless one of the failures has all these parts.
func wantFailure(t *testing.T, failures []error, parts ...string) {
	t.Helper()
	for _, failure := range failures {
		has := true
		for _, part := range parts {
			has = has && strings.Contains(failure.Error(), part)
		}
		if has {
			t.Log(failure)
			return
		}
	}
	t.Errorf("none of %d failures has %q:\n%v", len(failures), parts, errors.Join(failures...))
}
