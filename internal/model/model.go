// Package model is the flow of one message through the inbox as a small state machine. Its tests explore
// every order of the steps, with crashes, lost answers and redeliveries at every place, and show for each
// thing that the design does what happens without it. It is no part of the library: it models the design,
// the tests with real servers are about the code.
//
// One message, which the broker delivers at least once, two processes of one consumer, and a database. The
// handler writes one effect and returns one message, under a new UUID each time that it runs.
package model

// Design is what one may get wrong. The zero value is the library's.
type Design struct {
	ClaimFirst       bool // the claim is committed in a transaction of its own, before the effect
	ClaimLast        bool // the claim is committed in a transaction of its own, after the effect
	CheckThenInsert  bool // the claim is looked up and then inserted, without a unique key
	AckWaitingCopy   bool // a copy that meets an open claim is acknowledged as a duplicate instead of waiting
	NothingStored    bool // the produced message is not stored
	MarkAtCommit     bool // the produced message is marked as sent when it is stored, before it is published
	NewUUIDOnReplay  bool // the stored message gets a new UUID each time it is published
	AckBeforeCommit  bool // the message is acknowledged before the commit
	ClaimIsForgotten bool // a commit keeps the effect and not the claim
}

// State is all that the flow depends on. It is comparable, so that a set can hold it.
type State struct {
	Queue     uint8 // copies of the message that are ready to be delivered
	Processes [2]Process

	// The database: what is committed, and a transaction that the server has not rolled back yet.
	Claim    bool
	Effects  uint8
	Stored   uint8 // the UUID of the produced message, until it is marked as sent; 0 is none
	Orphaned bool  // an open transaction holds the claim, and its process is gone

	// What has happened.
	Runs       uint8 // the UUIDs that the handler has given
	Published  uint8 // the first UUID that was published; 0 is none
	OtherUUID  bool  // the produced message was published under another UUID as well
	AckedEarly bool  // a delivery was acknowledged before there was a committed effect

	// What may still go wrong.
	Crashes, Copies, Failures uint8
}

// Process is a consumer with at most one delivery in hand.
type Process struct {
	At          Stage
	Unacked     bool // the broker waits for its ack
	Transaction Transaction
	UUID        uint8 // of the produced message it has in hand; 0 is none
	Mark        bool  // it has acknowledged and will mark the stored message as sent
}

// Transaction is what is undone unless it is committed.
type Transaction struct {
	Claim, Effect bool
	Stored        uint8
}

// Stage is how far a process is with its delivery.
type Stage uint8

// The stages, in the order of the flow.
const (
	Idle      Stage = iota
	Received        // next: claim
	Claimed         // next: the handler
	Handled         // next: store what it returned
	Stored          // next: commit
	Unclaimed       // of ClaimLast only
	Committed       // next: publish
	Published       // next: ack
)

// Start is one message in the queue, and how often things may go wrong.
func Start(crashes, copies, failures uint8) State {
	return State{Queue: 1, Crashes: crashes, Copies: copies, Failures: failures}
}

// Final reports whether the queue is empty and no process is busy.
func (s State) Final() bool {
	return s.Queue == 0 && s.Processes[0].At == Idle && s.Processes[1].At == Idle
}

// Next is what a process did, or what happened to it, and where that has led.
type Next struct {
	Text  string
	State State
}

// anybody begins the text of what is not about a process.
const anybody = "- "

// steps are all that may happen. Each is a function that returns what it leads to, nothing when it is not its
// turn; more than one when it may also fail. The first eight are the flow, in its order.
var steps = []struct {
	name string
	take func(d Design, s State, process int) []Next
}{
	{"deliver", deliver}, {"claim", claim}, {"handle", handle}, {"store", store}, {"commit", commit},
	{"publish", publish}, {"ack", ack}, {"mark", mark},
	{"crash", crash}, {"disconnect", disconnect},
	{"duplicate", duplicate}, {"rollBackOrphan", rollBackOrphan}, // no process's
}

func deliver(_ Design, s State, p int) []Next {
	if s.Queue == 0 || s.Processes[p].At != Idle {
		return nil
	}
	s.Queue--
	s.Processes[p].At, s.Processes[p].Unacked = Received, true
	return []Next{{"receives the message", s}}
}

// claim inserts the key under its unique key. A copy of a processed message finds the record; one that meets
// an open claim waits, which here is having no step but to give up.
func claim(d Design, s State, p int) []Next {
	process := &s.Processes[p]
	switch {
	case process.At != Received:
		return nil
	case s.Claim && s.Stored == 0:
		process.At = Published // all was
		return []Next{{"finds the record, and nothing to send", s}}
	case s.Claim:
		process.At, process.UUID = Committed, s.Stored
		if d.NewUUIDOnReplay {
			s.Runs++
			process.UUID = s.Runs
		}
		return []Next{{"finds the record, and the stored message to send", s}}
	case s.held(d) && d.AckWaitingCopy:
		process.At = Published
		return []Next{{"finds the key claimed by an open transaction, and takes the message for processed", s}}
	case s.held(d):
		return []Next{{"waits for the open claim longer than the claim timeout, and nacks", s.nack(p)}}
	}
	process.At = Claimed
	switch {
	case d.ClaimFirst:
		s.Claim = true
		return []Next{{"claims the key and commits the claim", s}}
	case d.ClaimLast:
		return []Next{{"finds no record", s}}
	}
	process.Transaction.Claim = true
	return []Next{{"claims the key in a transaction", s}}
}

// held reports whether an open transaction holds the key. Without a unique key none is ever waited for.
func (s State) held(d Design) bool {
	return !d.CheckThenInsert && (s.Orphaned || s.Processes[0].Transaction.Claim || s.Processes[1].Transaction.Claim)
}

func handle(_ Design, s State, p int) []Next {
	if s.Processes[p].At != Claimed {
		return nil
	}
	handled := s
	handled.Runs++
	handled.Processes[p].At, handled.Processes[p].UUID = Handled, handled.Runs
	handled.Processes[p].Transaction.Effect = true
	next := []Next{{"runs the handler, which writes the effect and returns a message", handled}}
	if failed, ok := s.fail(); ok {
		next = append(next, Next{"runs the handler, which fails; rolls back and nacks", failed.nack(p)})
	}
	return next
}

func store(d Design, s State, p int) []Next {
	process := &s.Processes[p]
	if process.At != Handled {
		return nil
	}
	process.At = Stored
	switch {
	case d.NothingStored:
		return []Next{{"stores nothing", s}}
	case d.MarkAtCommit:
		return []Next{{"stores the produced message as sent", s}}
	}
	process.Transaction.Stored = process.UUID
	return []Next{{"stores the produced message", s}}
}

// commit may succeed without an answer, and it may be lost on its way. Both are an error to the process, and
// in the second the server learns only later that the connection is gone.
func commit(d Design, s State, p int) []Next {
	switch process := &s.Processes[p]; {
	case process.At == Unclaimed:
		s.Claim, process.At = true, Committed
		return []Next{{"claims the key and commits the claim", s}}
	case process.At != Stored || d.AckBeforeCommit && process.Unacked:
		return nil
	}
	committed := s
	process := &committed.Processes[p]
	if process.Transaction.Claim && !d.ClaimIsForgotten {
		committed.Claim = true
	}
	if process.Transaction.Stored != 0 {
		committed.Stored = process.Transaction.Stored
	}
	committed.Effects++
	process.At, process.Transaction = Committed, Transaction{}
	if d.ClaimLast {
		process.At = Unclaimed
	}
	next := []Next{{"commits", committed}}

	if failed, ok := committed.fail(); ok {
		next = append(next, Next{"commits, but the answer is lost; nacks", failed.nack(p)})
	}
	if failed, ok := s.fail(); ok {
		failed.Orphaned = failed.Orphaned || s.Processes[p].Transaction.Claim
		next = append(next, Next{"loses its connection before the commit; nacks", failed.nack(p)})
	}
	return next
}

func publish(_ Design, s State, p int) []Next {
	if s.Processes[p].At != Committed {
		return nil
	}
	published := s
	if uuid := s.Processes[p].UUID; s.Published == 0 {
		published.Published = uuid
	} else if uuid != s.Published {
		published.OtherUUID = true
	}
	next := make([]Next, 1, 3)
	if failed, ok := published.fail(); ok {
		next = append(next, Next{"publishes the produced message, but the confirm is lost; nacks", failed.nack(p)})
	}
	if failed, ok := s.fail(); ok {
		next = append(next, Next{"cannot publish the produced message; nacks", failed.nack(p)})
	}
	published.Processes[p].At = Published
	next[0] = Next{"publishes the produced message", published}
	return next
}

func ack(d Design, s State, p int) []Next {
	process := &s.Processes[p]
	early := d.AckBeforeCommit && process.At == Stored && process.Unacked
	if process.At != Published && !early {
		return nil
	}
	s.AckedEarly = s.AckedEarly || s.Effects == 0
	process.Unacked = false
	if early {
		return []Next{{"acknowledges", s}}
	}
	*process = Process{Mark: process.Mark || process.UUID != 0}
	return []Next{{"acknowledges", s}}
}

// mark comes later and in batches; nothing waits for it, and it may never come.
func mark(_ Design, s State, p int) []Next {
	if !s.Processes[p].Mark {
		return nil
	}
	s.Processes[p].Mark = false
	lost := s
	s.Stored = 0
	return []Next{{"marks the produced message as sent", s}, {"loses the mark", lost}}
}

// crash ends a process at any place; another takes its name at once. The broker takes its delivery back, and
// the server will notice that the connection is gone.
func crash(_ Design, s State, p int) []Next {
	process := s.Processes[p]
	if s.Crashes == 0 || process.At == Idle && !process.Mark {
		return nil
	}
	s.Crashes--
	s.Orphaned = s.Orphaned || process.Transaction.Claim
	s = s.nack(p)
	s.Processes[p].Mark = false
	return []Next{{"crashes; the broker takes back what is not acknowledged", s}}
}

// disconnect ends the connection to the broker only: the message is delivered again while its process goes on.
func disconnect(_ Design, s State, p int) []Next {
	s, ok := s.fail()
	if !ok || !s.Processes[p].Unacked {
		return nil
	}
	s.Queue++
	s.Processes[p].Unacked = false
	return []Next{{"loses its connection to the broker, which takes the message back, and goes on", s}}
}

// duplicate is the broker's or a producer's, at any time.
func duplicate(_ Design, s State, _ int) []Next {
	if s.Copies == 0 {
		return nil
	}
	s.Copies--
	s.Queue++
	return []Next{{anybody + "another copy of the message comes into the queue", s}}
}

func rollBackOrphan(_ Design, s State, _ int) []Next {
	if !s.Orphaned {
		return nil
	}
	s.Orphaned = false
	return []Next{{anybody + "the server notices a lost connection and rolls its transaction back", s}}
}

// fail uses up a failure, if there is one left.
func (s State) fail() (State, bool) {
	if s.Failures == 0 {
		return s, false
	}
	s.Failures--
	return s, true
}

// nack ends an attempt, with its transaction. The broker has the message again unless it was acknowledged, or
// taken back before.
func (s State) nack(p int) State {
	if s.Processes[p].Unacked {
		s.Queue++
	}
	s.Processes[p] = Process{Mark: s.Processes[p].Mark}
	return s
}
